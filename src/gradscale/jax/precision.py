"""The dtypes of parameters, computation and output, as one value."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp

from gradscale.errors import ConfigError
from gradscale.jax.casting import DTYPE_NAMES, is_float_array, parse_dtype
from gradscale.jax.names import path_name

_KEYS = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}


@dataclass(frozen=True, init=False, repr=False)
class Precision:
    """Cast trees to the dtypes of parameters, computation and output.

    Parameters are stored in param_dtype and cast to compute_dtype for the forward
    pass, whose result is cast to output_dtype. Gradients pass back through these
    casts, so they have the dtype of the parameters.

    Only arrays of floating-point numbers are cast. Integers, bools, complex numbers,
    PRNG keys, Python's and NumPy's scalars, strings, functions and None are unchanged.
    So is state, because a running mean in f16 would soon stop moving: the
    variables of an nnx module that are not `nnx.Param`, such as the statistics of a
    BatchNorm or the counts of a Dropout, and `equinox.nn.State`. A module that was
    cast shares these variables with the original, so that updates reach both. Linen
    keeps its statistics in a dict like any other: leave them out of the cast, or pass
    `keep={"batch_stats.*": "f32"}`.

    The value is hashable and compares by content, so it can be a static argument of
    `jax.jit`. `str` gives the text, `repr` the text and `keep`.

    >>> precision = Precision("p=f32,c=f16,o=f32", keep={"*norm*": "f32"})
    >>> params = {"dense": jnp.ones((2, 2)), "norm": jnp.ones(2), "steps": 3}
    >>> half = precision.cast_to_compute(params)
    >>> half["dense"].dtype.name, half["norm"].dtype.name, half["steps"]
    ('float16', 'float32', 3)

    **The promotion trap.** A layer kept in f32 returns f32, and a layer without a
    dtype of its own then computes in the wider of the two, to the end of the model:

    >>> x = precision.cast_to_compute(jnp.ones((1, 2)))
    >>> normed = x * half["norm"]
    >>> (normed @ half["dense"]).dtype.name
    'float32'

    Cast the output of the layer, and the next one computes in f16 again:

    >>> normed = precision.cast_to_compute(normed)
    >>> (normed @ half["dense"]).dtype.name
    'float16'

    With Linen, `LayerNorm(..., dtype=jnp.float16)` does the same: it computes in f32
    and returns f16; a `dtype` on the layers that follow works too. In nnx a `dtype`
    rounds the norm's weights as well, and `nnx.Embed` keeps the dtype it was made
    with: cast their outputs instead. The norms of Equinox compute in f32 and
    return the dtype of their input, except BatchNorm, which computes in that dtype:
    cast its input to f32 and its output back.

    Args:
        text: A dtype for each of p or params, c or compute, o or output, such as
            "p=f32,c=f16,o=f32". Defaults: params is f32, compute follows
            params, output follows compute. A single dtype, such as "bf16", sets all
            three. "full" is f32; "half" queries the devices of JAX and is bf16 on a
            TPU, f16 elsewhere.
        keep: Dtypes of single leaves in the forward pass: a mapping, or pairs, of
            patterns to dtypes. A pattern is matched as by `fnmatch`, ignoring case,
            against the dotted path of the leaf, such as `layers.0.norm.weight`; the
            last part of an nnx path, `.value`, may be left out. The first match
            wins. A pattern that matches nothing is no error in a cast, because
            batches are cast as well; `check` finds it.

    Raises:
        ConfigError: The text, a pattern or a dtype is invalid.
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    keep: tuple[tuple[str, str], ...]

    def __init__(
        self, text: str, *, keep: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    ) -> None:
        param, compute, output = _parse_text(text)
        object.__setattr__(self, "param_dtype", param)
        object.__setattr__(self, "compute_dtype", compute)
        object.__setattr__(self, "output_dtype", output)
        object.__setattr__(self, "keep", _parse_keep(keep))

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return "p={},c={},o={}".format(*map(_name_of, dtypes))

    def __repr__(self) -> str:
        keep = f", keep={dict(self.keep)}" if self.keep else ""
        return f"Precision({str(self)!r}{keep})"

    def cast_to_param(self, tree: Any) -> Any:
        """Cast to the dtype in which parameters are stored and updated.

        `keep` is not used: it applies to the forward pass.

        >>> params = {"norm": jnp.ones(2, jnp.float16)}
        >>> precision = Precision("c=f16", keep={"norm": "bf16"})
        >>> precision.cast_to_param(params)["norm"].dtype.name
        'float32'
        """
        return _cast(tree, lambda path: self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast to the dtype of the forward pass; leaves matched by `keep`, to its own.

        For parameters and for batches. An array that is not in a tree has an empty
        path, which `*` matches.

        >>> Precision("c=bf16").cast_to_compute([jnp.ones(2), 7])[0].dtype.name
        'bfloat16'
        """
        return _cast(tree, self._dtype_in_forward)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast to the dtype in which the loss is computed.

        >>> Precision("c=f16,o=f32").cast_to_output(jnp.float16(2.0)).dtype.name
        'float32'
        """
        return _cast(tree, lambda path: self.output_dtype)

    def wrap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fun` with arguments cast to compute and the result to output.

        A module of Equinox or nnx, or a method of one, is cast with its arguments. So
        these are complete forward passes, to be differentiated with respect to the
        parameters in f32:

            precision.wrap(model.apply)({"params": params}, x)  # Linen
            jax.vmap(precision.wrap(model))(x)                  # Equinox
            precision.wrap(model)(x)                            # nnx

        The casts happen in each call, so that gradients pass through them. The whole
        result is cast: where it carries Linen's statistics, output should be f32.

        >>> double = Precision("p=f32,c=f16,o=f32").wrap(lambda x: (x + x, x.dtype))
        >>> y, inside = double(jnp.ones(2))
        >>> inside.name, y.dtype.name
        ('float16', 'float32')
        """

        # Not the attributes: those of a module are its parameters.
        @functools.wraps(fun, updated=())
        def cast_fun(*args: Any, **kwargs: Any) -> Any:
            # One by one: the name of an argument is not part of a path.
            args = tuple(self.cast_to_compute(arg) for arg in args)
            kwargs = {key: self.cast_to_compute(arg) for key, arg in kwargs.items()}
            return self.cast_to_output(self._cast_callable(fun)(*args, **kwargs))

        return cast_fun

    def check(self, params: Any) -> None:
        """Raise if a pattern of `keep` has no effect: it may be misspelt.

        Call it once, with the parameters that are passed to `cast_to_compute`. A
        pattern whose leaves are all matched by earlier patterns has no effect.

        Raises:
            ConfigError: There is such a pattern.

        >>> Precision("c=f16", keep={"*norm*": "f32"}).check({"norm": jnp.ones(2)})
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_state)
        paths = [path for path, leaf in leaves if is_float_array(leaf)]
        used = {self._first_match(path) for path in paths}
        idle = [pair[0] for pair in self.keep if pair not in used]
        if idle:
            names = ", ".join(map(path_name, paths[:5])) or "no floating-point array"
            more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            raise ConfigError(
                f"keep decides for no leaf with {', '.join(map(repr, idle))}. The "
                "leaves meant get another dtype: no array has such a path, or a "
                f"pattern before it matches first. The tree has {names}{more}. Correct "
                "the pattern, move it up, or remove it.",
                code="GS101",
            )

    def _cast_callable(self, fun: Any) -> Any:
        if inspect.ismethod(fun):
            return MethodType(fun.__func__, self.cast_to_compute(fun.__self__))
        return self.cast_to_compute(fun)

    def _dtype_in_forward(self, path: Any) -> Any:
        pair = self._first_match(path)
        return parse_dtype(pair[1]) if pair else self.compute_dtype

    def _first_match(self, path: Any) -> tuple[str, str] | None:
        """Return the first pair of `keep` whose pattern matches a path."""
        # A bound method of Equinox is a tree, and its module is called __self__.
        name = path_name(path).lower().removeprefix("__self__.") if path else ""
        names = {name, name.removesuffix(".value")}
        for pattern, dtype in self.keep:
            if any(fnmatchcase(name, pattern.lower()) for name in names):
                return pattern, dtype
        return None


def _cast(tree: Any, dtype_at: Callable[[Any], Any]) -> Any:
    """Cast the floating-point arrays of a tree; other leaves and state stay."""

    def cast(path: Any, leaf: Any) -> Any:
        return leaf.astype(dtype_at(path)) if is_float_array(leaf) else leaf

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    """Return True for a node that its library marks as state."""
    # Not imported: a node of a library exists only if the library is loaded.
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(node, nnx.Variable):
        return not isinstance(node, nnx.Param)
    return equinox is not None and isinstance(node, equinox.nn.State)


def _name_of(dtype: Any) -> str:
    return DTYPE_NAMES[dtype][0]


def _parse_text(text: str) -> tuple[Any, Any, Any]:
    """Return the dtypes of params, compute and output."""
    if not isinstance(text, str):
        raise ConfigError(
            f"text={text!r} is a {type(text).__name__}. It names up to three dtypes, "
            "so it must be a string. Pass one such as 'p=f32,c=f16,o=f32'.",
            code="GS101",
        )
    if "=" not in text:
        dtype = parse_dtype(text.strip())
        return dtype, dtype, dtype
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, name = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS or not name:
            raise ConfigError(
                f"{part!r} in {text!r} sets nothing. Each part is a key, '=' and a "
                "dtype; the keys are p or params, c or compute, o or output. Write it "
                "as in 'p=f32,c=f16,o=f32'.",
                code="GS101",
            )
        if _KEYS[key] in given:
            raise ConfigError(
                f"{part!r} in {text!r} sets a dtype that is set already. Only one can "
                "hold. Remove one of them.",
                code="GS101",
            )
        given[_KEYS[key]] = parse_dtype(name)
    param = given.get("p", jnp.float32)
    compute = given.get("c", param)
    return param, compute, given.get("o", compute)


def _parse_keep(keep: Any) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `keep`, each dtype under the name that is printed."""
    pairs: dict[str, str] = {}
    for pattern, name in _pairs(keep):
        if not isinstance(pattern, str) or not isinstance(name, str):
            raise ConfigError(
                f"keep has the pair {pattern!r}: {name!r}. A pattern is compared with "
                "the path of a leaf and a dtype is looked up by its name, so both must "
                "be strings. Pass for instance keep={'*norm*': 'f32'}.",
                code="GS101",
            )
        if pattern.lower() in map(str.lower, pairs):
            raise ConfigError(
                f"keep has {pattern!r} twice. Case is ignored and the first match "
                "wins, so the second would never be used. Remove one of them.",
                code="GS101",
            )
        pairs[pattern] = _name_of(parse_dtype(name))
    return tuple(pairs.items())


def _pairs(keep: Any) -> list[tuple[Any, Any]]:
    try:
        pairs = keep.items() if isinstance(keep, Mapping) else keep
        return [(pattern, name) for pattern, name in pairs]
    except (TypeError, ValueError):
        raise ConfigError(
            f"keep={keep!r} does not consist of pairs. Each pattern needs the dtype "
            "that its leaves keep. Pass a mapping such as {'*norm*': 'f32'}.",
            code="GS101",
        ) from None
