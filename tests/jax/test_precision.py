"""Precision: its text, its casts, and the models that compute in it."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from gradscale import ConfigError
from gradscale.jax.casting import DTYPE_NAMES, half_dtype
from gradscale.jax.precision import Precision

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
MIXED = Precision("p=f32,c=f16,o=f32", keep={"*norm*": "f32"})

DTYPES = st.sampled_from(list(DTYPE_NAMES))
NAMES = st.sampled_from([name for names in DTYPE_NAMES.values() for name in names])
KEEPS = st.lists(
    st.tuples(st.text(), NAMES), max_size=4, unique_by=lambda pair: pair[0].lower()
)


def dtypes(precision):
    return precision.param_dtype, precision.compute_dtype, precision.output_dtype


def names_of_dtypes(tree):
    """Return the tree with the name of a dtype in place of every array."""
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


# --- the text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p=f32,c=f16,o=f32", (F32, F16, F32)),
        ("params=float32,compute=bfloat16,output=full", (F32, BF16, F32)),
        ("o=f32,c=f16,p=bf16", (BF16, F16, F32)),
        (" p = f32 , c = f16 ", (F32, F16, F16)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        ("o=f16", (F32, F32, F16)),
        ("c=f16,o=f32", (F32, F16, F32)),
        ("bf16", (BF16, BF16, BF16)),
        ("full", (F32, F32, F32)),
        ("float64", (F64, F64, F64)),
    ],
)
def test_a_text_names_three_dtypes(text, expected):
    assert dtypes(Precision(text)) == expected


def test_half_is_the_half_precision_of_the_device():
    assert dtypes(Precision("c=half,o=full")) == (F32, half_dtype(), F32)


@given(DTYPES, DTYPES, DTYPES, KEEPS)
def test_the_text_and_keep_make_the_same_value_again(param, compute, output, keep):
    text = ",".join(
        f"{key}={DTYPE_NAMES[dtype][-1]}"
        for key, dtype in zip("pco", (param, compute, output), strict=True)
    )
    precision = Precision(text, keep=keep)
    assert Precision(str(precision), keep=precision.keep) == precision
    assert dtypes(precision) == (param, compute, output)


@given(NAMES, KEEPS)
def test_the_repr_is_python_for_the_same_value(name, keep):
    precision = Precision(name, keep=keep)
    # Its only names are Precision and keep.
    assert eval(repr(precision)) == precision


def test_the_text_has_the_short_names():
    assert str(Precision("params=full,compute=bfloat16")) == "p=f32,c=bf16,o=bf16"


def test_the_repr_shows_what_is_kept():
    assert repr(MIXED) == "Precision('p=f32,c=f16,o=f32', keep={'*norm*': 'f32'})"


def test_the_repr_of_a_value_that_keeps_nothing_is_short():
    assert repr(Precision("f16")) == "Precision('p=f16,c=f16,o=f16')"


SETS_NOTHING = (
    "sets nothing. Each part is a key, '=' and a dtype; the keys are p or params, c or "
    "compute, o or output. Write it as in 'p=f32,c=f16,o=f32'. [GS101]"
)
SET_ALREADY = (
    "sets a dtype that is set already. Only one can hold. Remove one of them. [GS101]"
)
NO_DTYPE = "is not the name of a dtype. Only floating-point dtypes can be cast to"
NO_STRING = (
    "It names up to three dtypes, so it must be a string. Pass one such as "
    "'p=f32,c=f16,o=f32'. [GS101]"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(text, said, id=repr(text))
        for text, said in [
            ("x=f16", f"'x=f16' in 'x=f16' {SETS_NOTHING}"),
            ("P=f16", f"'P=f16' in 'P=f16' {SETS_NOTHING}"),
            ("p=f32,c", f"'c' in 'p=f32,c' {SETS_NOTHING}"),
            ("p=f32,f16", f"'f16' in 'p=f32,f16' {SETS_NOTHING}"),
            ("p=f32,", f"'' in 'p=f32,' {SETS_NOTHING}"),
            ("p=f32,,c=f16", f"'' in 'p=f32,,c=f16' {SETS_NOTHING}"),
            ("=f16", f"'=f16' in '=f16' {SETS_NOTHING}"),
            ("c=", f"'c=' in 'c=' {SETS_NOTHING}"),
            ("p=f32;c=f16", f"'f32;c=f16' {NO_DTYPE}"),
            ("p=f32,p=f16", f"'p=f16' in 'p=f32,p=f16' {SET_ALREADY}"),
            ("c=f16,compute=f16", "'compute=f16' in 'c=f16,compute=f16' sets"),
            ("p=f8", f"'f8' {NO_DTYPE}"),
            ("p=int32", f"'int32' {NO_DTYPE}"),
            ("p=f32=f16", f"'f32=f16' {NO_DTYPE}"),
            ("f32,f16", f"'f32,f16' {NO_DTYPE}"),
            ("F16", f"'F16' {NO_DTYPE}"),
            ("", f"'' {NO_DTYPE}"),
            (16, f"text=16 is a int. {NO_STRING}"),
            (None, f"text=None is a NoneType. {NO_STRING}"),
        ]
    ],
)
def test_a_text_that_cannot_be_understood_is_refused(text, said):
    with pytest.raises(ConfigError) as error:
        Precision(text)
    assert str(error.value).startswith(said)
    assert error.value.code == "GS101"


NO_PAIRS = (
    "does not consist of pairs. Each pattern needs the dtype that its leaves keep. "
    "Pass a mapping such as {'*norm*': 'f32'}. [GS101]"
)
BOTH_STRINGS = (
    "A pattern is compared with the path of a leaf and a dtype is looked up by its "
    "name, so both must be strings. Pass for instance keep={'*norm*': 'f32'}. [GS101]"
)
TWICE = (
    "twice. Case is ignored and the first match wins, so the second would never be "
    "used. Remove one of them. [GS101]"
)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        pytest.param(keep, said, id=repr(keep))
        for keep, said in [
            ("*norm*", f"keep='*norm*' {NO_PAIRS}"),
            (["*norm*"], f"keep=['*norm*'] {NO_PAIRS}"),
            (None, f"keep=None {NO_PAIRS}"),
            (32, f"keep=32 {NO_PAIRS}"),
            ({3: "f32"}, f"keep has the pair 3: 'f32'. {BOTH_STRINGS}"),
            ({"a": F32}, f"keep has the pair 'a': {F32!r}. {BOTH_STRINGS}"),
            ([("a", ["f32"])], f"keep has the pair 'a': ['f32']. {BOTH_STRINGS}"),
            ([("a", "f32"), ("a", "f16")], f"keep has 'a' {TWICE}"),
            ({"norm": "f32", "Norm": "f32"}, f"keep has 'Norm' {TWICE}"),
            ({"a": "int8"}, f"'int8' {NO_DTYPE}"),
        ]
    ],
)
def test_a_keep_that_cannot_be_understood_is_refused(keep, said):
    with pytest.raises(ConfigError) as error:
        Precision("f16", keep=keep)
    assert str(error.value).startswith(said)
    assert error.value.code == "GS101"


def test_what_is_kept_is_given_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        Precision("f16", {"*norm*": "f32"})


# --- a value --------------------------------------------------------------------------


def test_values_with_the_same_content_are_equal_and_hash_alike():
    one = Precision("c=f16,o=f32", keep={"*norm*": "full"})
    two = Precision("output=f32,compute=float16", keep=[("*norm*", "f32")])
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    "other",
    [
        Precision("p=f16,c=f16,o=f32", keep=MIXED.keep),
        Precision("p=f32,c=bf16,o=f32", keep=MIXED.keep),
        Precision("p=f32,c=f16,o=f16", keep=MIXED.keep),
        Precision("p=f32,c=f16,o=f32"),
        Precision("p=f32,c=f16,o=f32", keep={"*norm*": "bf16"}),
    ],
    ids=repr,
)
def test_values_with_other_content_differ(other):
    assert other != MIXED


def test_the_order_of_patterns_is_content():
    pairs = [("a*", "f32"), ("*b", "bf16")]
    assert Precision("f16", keep=pairs) != Precision("f16", keep=pairs[::-1])


def test_a_value_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        MIXED.compute_dtype = BF16


def test_a_value_survives_pickling():
    assert pickle.loads(pickle.dumps(MIXED)) == MIXED


def test_equal_values_as_static_arguments_trace_once():
    traced = []

    def cast(precision, x):
        traced.append(precision)
        return precision.cast_to_compute(x)

    jitted = jax.jit(cast, static_argnums=0)
    jitted(Precision("c=f16"), jnp.ones(2))
    y = jitted(Precision("p=full,c=float16,o=f16"), jnp.ones(2))
    assert y.dtype == F16
    assert len(traced) == 1


def test_another_value_as_static_argument_traces_again():
    jitted = jax.jit(
        lambda precision, x: precision.cast_to_compute(x), static_argnums=0
    )
    jitted(Precision("c=f16"), jnp.ones(2))
    assert jitted(Precision("c=bf16"), jnp.ones(2)).dtype == BF16


# --- the casts ------------------------------------------------------------------------

CASTS = pytest.mark.parametrize(
    "cast", ["cast_to_param", "cast_to_compute", "cast_to_output"]
)


@pytest.mark.parametrize(
    ("cast", "expected"),
    [
        ("cast_to_param", "bfloat16"),
        ("cast_to_compute", "float16"),
        ("cast_to_output", "float32"),
    ],
)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_every_cast_has_its_dtype(cast, expected, dtype):
    tree = {"a": jnp.ones(2, dtype), "b": [np.ones(2, dtype)]}
    cast_tree = getattr(Precision("p=bf16,c=f16,o=f32"), cast)(tree)
    assert names_of_dtypes(cast_tree) == {"a": expected, "b": [expected]}


@CASTS
@pytest.mark.parametrize(
    "leaf",
    [
        jnp.arange(3),
        np.arange(3),
        jnp.array([True]),
        jnp.ones(2, jnp.complex64),
        jax.random.key(0),
        jax.random.PRNGKey(0),
        3,
        2.5,
        True,
        1j,
        np.float32(2.5),
        "text",
        jnp.tanh,
        F32,
    ],
    # That of a function has its address, another one in each process.
    ids=lambda leaf: "tanh" if leaf is jnp.tanh else repr(leaf),
)
def test_what_is_no_array_of_floats_stays_the_same_object(cast, leaf):
    assert getattr(Precision("f16"), cast)({"leaf": leaf})["leaf"] is leaf


@CASTS
def test_the_structure_of_a_tree_stays(cast):
    tree = {"none": None, "empty": (), "pair": (jnp.ones(1), [2])}
    cast_tree = getattr(Precision("f16"), cast)(tree)
    assert jax.tree.structure(cast_tree) == jax.tree.structure(tree)


def test_there_and_back_is_exact_for_what_f16_can_hold():
    x = jnp.array([0.0, -1.5, 2.0**-24, 65504.0])
    back = MIXED.cast_to_param(MIXED.cast_to_compute(x))
    assert (back == x).all()


# --- what is kept ---------------------------------------------------------------------

TREE = {
    "layers": [{"norm": {"weight": jnp.ones(2)}, "dense": {"weight": jnp.ones(2)}}],
    "LayerNorm_0": {"scale": jnp.ones(2)},
}


def kept(keep):
    """Return the paths of TREE's leaves that do not get f16."""
    half = Precision("c=f16", keep=keep).cast_to_compute(TREE)
    leaves = jax.tree_util.tree_flatten_with_path(half)[0]
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if leaf.dtype != F16
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*norm*", ["LayerNorm_0.scale", "layers.0.norm.weight"]),
        ("*NORM*", ["LayerNorm_0.scale", "layers.0.norm.weight"]),
        ("layers.0.norm.weight", ["layers.0.norm.weight"]),
        ("layers.?.dense.*", ["layers.0.dense.weight"]),
        ("layers.[0-3].dense.*", ["layers.0.dense.weight"]),
        ("layernorm_0.scale", ["LayerNorm_0.scale"]),
        ("norm", []),
        ("layers[0]*", []),
    ],
)
def test_a_pattern_is_matched_against_the_whole_path(pattern, expected):
    assert kept({pattern: "f32"}) == expected


def test_the_first_match_wins():
    keep = [("layers.0.norm.*", "bf16"), ("*norm*", "f32")]
    half = Precision("c=f16", keep=keep).cast_to_compute(TREE)
    assert half["layers"][0]["norm"]["weight"].dtype == BF16
    assert half["LayerNorm_0"]["scale"].dtype == F32


def test_what_is_kept_is_cast_to_its_dtype():
    half = MIXED.cast_to_compute({"norm": jnp.ones(2, F16)})
    assert half["norm"].dtype == F32


def test_what_is_kept_is_stored_like_every_parameter():
    precision = Precision("p=bf16,c=f16", keep={"*norm*": "f32"})
    assert precision.cast_to_param({"norm": jnp.ones(2)})["norm"].dtype == BF16


def test_output_is_cast_whatever_its_name():
    precision = Precision("c=f16,o=bf16", keep={"*norm*": "f32"})
    assert precision.cast_to_output({"norm": jnp.ones(2)})["norm"].dtype == BF16


@pytest.mark.parametrize(("pattern", "dtype"), [("*tree*", F16), ("*", F32)])
def test_an_array_that_is_in_no_tree_has_an_empty_path(pattern, dtype):
    precision = Precision("c=f16", keep={pattern: "f32"})
    assert precision.cast_to_compute(jnp.ones(2)).dtype == dtype


def test_a_batch_that_no_pattern_matches_is_cast_without_a_word():
    assert MIXED.cast_to_compute({"image": jnp.ones(2)})["image"].dtype == F16


# --- check ----------------------------------------------------------------------------


def test_patterns_that_all_decide_for_a_leaf_pass():
    assert Precision("c=f16", keep={"*norm*": "f32", "*": "f16"}).check(TREE) is None


def test_nothing_kept_passes_with_any_tree():
    assert Precision("c=f16").check({}) is None


def test_a_misspelt_pattern_is_named_beside_the_paths_there_are():
    with pytest.raises(ConfigError) as error:
        Precision("c=f16", keep={"*norm*": "f32", "*nrom*": "f32"}).check(TREE)
    assert str(error.value) == (
        "keep decides for no leaf with '*nrom*'. The leaves meant get another "
        "dtype: no array has such a path, or a pattern before it matches first. The "
        "tree has LayerNorm_0.scale, layers.0.dense.weight, layers.0.norm.weight. "
        "Correct the pattern, move it up, or remove it. [GS101]"
    )


def test_of_many_paths_five_are_named():
    tree = {"layers": [jnp.ones(1)] * 8, "steps": jnp.arange(2)}
    with pytest.raises(ConfigError, match=r"has layers.0, .*, layers.4 and 3 more\."):
        MIXED.check(tree)


def test_a_pattern_that_comes_too_late_is_found():
    with pytest.raises(ConfigError, match=r"with '\*norm\*'\. .* move it up"):
        Precision("c=f16", keep=[("*", "f16"), ("*norm*", "f32")]).check(TREE)


def test_a_pattern_for_what_is_never_cast_is_found():
    with pytest.raises(ConfigError, match="The tree has no floating-point array"):
        MIXED.check({"norm": jnp.arange(2)})


# --- wrap -----------------------------------------------------------------------------


def test_a_wrapped_function_computes_in_half_and_returns_full():
    seen = []

    def forward(params, x, *, shift):
        seen.append(names_of_dtypes((params, x, shift)))
        return {"y": params["w"] * x + shift}

    ones = jnp.ones(2)
    result = MIXED.wrap(forward)({"w": ones, "norm": ones}, ones, shift=ones)
    assert seen == [({"w": "float16", "norm": "float32"}, "float16", "float16")]
    assert result["y"].dtype == F32


def test_the_name_of_an_argument_is_no_path():
    inside = MIXED.wrap(lambda norm: norm.dtype.name)
    assert inside(norm=jnp.ones(2)) == "float16"


def test_a_wrapped_function_keeps_its_name_and_signature():
    def forward(x, training=False):
        """Say what it does."""
        return x * 2 if training else x

    wrapped = MIXED.wrap(forward)
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Say what it does.")
    jitted = jax.jit(wrapped, static_argnames="training")
    assert jitted(jnp.ones(()), training=True) == 2.0


def test_gradients_pass_back_through_the_casts():
    loss = MIXED.wrap(lambda params, x: (params["w"] * params["norm"] * x).sum())
    params = {"w": jnp.ones(2), "norm": jnp.ones(2)}
    grads = jax.jit(jax.grad(loss))(params, jnp.array([1.0, 2.0]))
    assert names_of_dtypes(grads) == {"w": "float32", "norm": "float32"}
    assert grads["w"].tolist() == [1.0, 2.0]


# --- real models ----------------------------------------------------------------------

X = jax.random.normal(jax.random.key(0), (32, 4))
Y = jnp.sin(X).sum(axis=1, keepdims=True)
SGD = optax.sgd(0.05)


def mean_square(prediction):
    assert prediction.dtype == F32
    return jnp.mean((prediction - Y) ** 2)


class LinenNet(linen.Module):
    norm_dtype: Any = F16
    head_dtype: Any = None

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8, name="hidden")(x)
        x = linen.LayerNorm(dtype=self.norm_dtype, name="norm")(x)
        return linen.Dense(1, dtype=self.head_dtype, name="head")(linen.tanh(x))


class NnxNet(nnx.Module):
    def __init__(self, norm_dtype=F16, head_dtype=None):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, dtype=norm_dtype, rngs=rngs)
        self.head = nnx.Linear(8, 1, dtype=head_dtype, rngs=rngs)

    def stages(self, x):
        hidden = self.hidden(x)
        norm = self.norm(hidden)
        return {"hidden": hidden, "norm": norm, "head": self.head(nnx.tanh(norm))}

    def seen(self, x):
        return names_of_dtypes(self.stages(x))

    def __call__(self, x):
        return self.stages(x)["head"]


class EquinoxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    activation: Callable[..., Any]
    name: str = eqx.field(static=True)

    def __init__(self):
        one, two = jax.random.split(jax.random.key(0))
        self.hidden = eqx.nn.Linear(4, 8, key=one)
        self.norm = eqx.nn.LayerNorm(8)
        self.head = eqx.nn.Linear(8, 1, key=two)
        self.activation, self.name = jnp.tanh, "net"

    def stages(self, x):
        hidden = self.hidden(x)
        norm = self.norm(hidden)
        return {
            "hidden": hidden,
            "norm": norm,
            "head": self.head(self.activation(norm)),
        }

    def seen(self, x):
        return names_of_dtypes(self.stages(x))

    def __call__(self, x):
        return self.stages(x)["head"]


def linen_stages(model, params):
    half = MIXED.cast_to_compute(params)
    x = MIXED.cast_to_compute(X)
    _, aside = model.apply({"params": half}, x, capture_intermediates=True)
    return {
        name: aside["intermediates"][name]["__call__"][0].dtype.name
        for name in ("hidden", "norm", "head")
    }


ALL_HALF = {"hidden": "float16", "norm": "float16", "head": "float16"}
TRAPPED = {"hidden": "float16", "norm": "float32", "head": "float32"}
ESCAPED = {"hidden": "float16", "norm": "float32", "head": "float16"}
REMEDIES = pytest.mark.parametrize(
    ("norm_dtype", "head_dtype", "expected"),
    [(None, None, TRAPPED), (F16, None, ALL_HALF), (None, F16, ESCAPED)],
    ids=["none", "dtype of the norm", "dtype of the next layer"],
)


# Linen


@REMEDIES
def test_a_linen_norm_in_f32_widens_what_follows_unless_told(
    norm_dtype, head_dtype, expected
):
    model = LinenNet(norm_dtype, head_dtype)
    params = model.init(jax.random.key(0), X)["params"]
    assert linen_stages(model, params) == expected


def test_linen_parameters_are_cast_but_for_the_norm():
    params = LinenNet().init(jax.random.key(0), X)["params"]
    MIXED.check(params)
    assert names_of_dtypes(MIXED.cast_to_compute(params)) == {
        "hidden": {"kernel": "float16", "bias": "float16"},
        "norm": {"scale": "float32", "bias": "float32"},
        "head": {"kernel": "float16", "bias": "float16"},
    }


def test_a_linen_model_trains_in_f16_with_parameters_in_f32():
    model = LinenNet()
    params = model.init(jax.random.key(0), X)["params"]
    forward = MIXED.wrap(model.apply)

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(
            lambda params: mean_square(forward({"params": params}, X))
        )(params)
        updates, _ = SGD.update(grads, SGD.init(params))
        return optax.apply_updates(params, updates), loss, grads

    moved, before, grads = step(params)
    _, after, _ = step(moved)
    assert set(jax.tree.leaves(names_of_dtypes((grads, moved)))) == {"float32"}
    assert after < before


class LinenConv(linen.Module):
    @linen.compact
    def __call__(self, x, training):
        x = linen.Conv(3, (3,), name="conv")(x)
        x = linen.BatchNorm(not training, momentum=0.5, dtype=F16, name="norm")(x)
        return x.mean(axis=(1, 2))


@pytest.mark.parametrize(
    "keep", [{"*norm*": "f32"}, {"batch_stats.*": "f32"}], ids=repr
)
def test_linen_statistics_that_are_kept_stay_in_f32_and_move(keep):
    precision = Precision("p=f32,c=f16,o=f32", keep=keep)
    model, x = LinenConv(), 3.0 + X[..., None]
    variables = model.init(jax.random.key(0), x, training=False)
    precision.check(variables)
    half = precision.cast_to_compute(variables)
    assert half["params"]["conv"]["kernel"].dtype == F16
    assert half["batch_stats"]["norm"]["mean"].dtype == F32
    y, moved = precision.wrap(model.apply)(
        variables, x, training=True, mutable=["batch_stats"]
    )
    mean = moved["batch_stats"]["norm"]["mean"]
    assert y.dtype == mean.dtype == F32
    assert (mean != 0.0).all()


# nnx


@REMEDIES
def test_an_nnx_norm_in_f32_widens_what_follows_unless_told(
    norm_dtype, head_dtype, expected
):
    half = MIXED.cast_to_compute(NnxNet(norm_dtype, head_dtype))
    assert half.seen(MIXED.cast_to_compute(X)) == expected


def test_an_nnx_module_is_cast_but_for_the_norm():
    model = NnxNet()
    MIXED.check(model)
    half = MIXED.cast_to_compute(model)
    assert isinstance(half, NnxNet)
    assert half.hidden.kernel.dtype == F16
    assert half.norm.scale.dtype == F32
    assert model.hidden.kernel.dtype == F32


def test_an_nnx_path_may_end_before_value():
    precision = Precision("c=f16", keep={"*.bias": "f32", "*.kernel.value": "bf16"})
    half = precision.cast_to_compute(NnxNet())
    assert half.head.bias.dtype == F32
    assert half.head.kernel.dtype == BF16


def test_a_split_nnx_module_is_cast_and_merged():
    graphdef, params = nnx.split(NnxNet(), nnx.Param)

    @jax.jit
    def grads_of(params):
        def loss(params):
            half = nnx.merge(graphdef, MIXED.cast_to_compute(params))
            stages = half.stages(MIXED.cast_to_compute(X))
            assert names_of_dtypes(stages) == ALL_HALF
            return mean_square(MIXED.cast_to_output(stages["head"]))

        return jax.grad(loss)(params)

    grads = grads_of(params)
    assert isinstance(grads, nnx.State)
    assert set(jax.tree.leaves(names_of_dtypes(grads))) == {"float32"}


def test_an_nnx_model_trains_in_f16_with_parameters_in_f32():
    model = NnxNet()
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(
            lambda model: mean_square(MIXED.wrap(model)(X))
        )(model)
        optimizer.update(model, grads)
        return loss, grads

    before, grads = step(model, optimizer)
    after, _ = step(model, optimizer)
    params = nnx.state(model, nnx.Param)
    assert set(jax.tree.leaves(names_of_dtypes((grads, params)))) == {"float32"}
    assert after < before


class NnxConv(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 3, (3,), rngs=rngs)
        self.batch = nnx.BatchNorm(3, momentum=0.5, dtype=F16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.batch(self.conv(x)))
        assert x.dtype == F16
        return x.mean(axis=(1, 2))


@CASTS
def test_nnx_state_is_shared_and_not_cast(cast):
    model = NnxConv()
    cast_model = getattr(Precision("f16"), cast)(model)
    assert cast_model.batch.scale.dtype == F16
    assert cast_model.batch.mean is model.batch.mean
    assert cast_model.batch.var is model.batch.var
    assert cast_model.dropout.rngs.count is model.dropout.rngs.count


def test_nnx_statistics_and_dropout_counts_move_in_a_step():
    model = NnxConv()

    @nnx.jit
    def step(model):
        def loss(model):
            return MIXED.wrap(model)(3.0 + X[..., None]).sum()

        return nnx.grad(loss)(model)

    step(model)
    assert model.batch.mean.dtype == F32
    assert (model.batch.mean[...] != 0.0).all()
    assert model.dropout.rngs.count[...] == 1


def test_the_state_of_a_split_nnx_module_is_not_cast():
    half = MIXED.cast_to_compute(nnx.state(NnxConv()))
    assert half["conv"]["kernel"].dtype == F16
    assert half["batch"]["mean"].dtype == F32


# Equinox


def test_an_equinox_norm_in_f32_returns_what_it_was_given():
    half = MIXED.cast_to_compute(EquinoxNet())
    assert half.seen(MIXED.cast_to_compute(X[0])) == ALL_HALF


def test_an_equinox_module_is_cast_but_for_the_norm():
    model = EquinoxNet()
    MIXED.check(model)
    half = MIXED.cast_to_compute(model)
    assert half.hidden.weight.dtype == half.head.bias.dtype == F16
    assert half.norm.weight.dtype == F32
    assert half.activation is model.activation
    assert (half.name, half.hidden.in_features) == ("net", 4)


def test_an_equinox_model_trains_in_f16_with_parameters_in_f32():
    model = EquinoxNet()

    @eqx.filter_jit
    def step(model):
        loss, grads = eqx.filter_value_and_grad(
            lambda model: mean_square(jax.vmap(MIXED.wrap(model))(X))
        )(model)
        updates, _ = SGD.update(grads, SGD.init(eqx.filter(model, eqx.is_array)))
        return eqx.apply_updates(model, updates), loss, grads

    moved, before, grads = step(model)
    _, after, _ = step(moved)
    arrays = eqx.filter((grads, moved), eqx.is_array)
    assert set(jax.tree.leaves(names_of_dtypes(arrays))) == {"float32"}
    assert after < before


class EquinoxBatch(eqx.Module):
    head: eqx.nn.Linear
    batch: eqx.nn.BatchNorm

    def __init__(self, mode):
        self.head = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        self.batch = eqx.nn.BatchNorm(3, "batch", mode=mode)

    def __call__(self, x, state):
        x = self.head(x)
        assert x.dtype == F16
        x, state = self.batch(x.astype(F32), state)
        return x.astype(F16), state


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_equinox_statistics_stay_in_f32_and_move(mode):
    model, state = eqx.nn.make_with_state(EquinoxBatch)(mode)

    @Precision("p=f32,c=f16,o=bf16").wrap
    def forward(model, x, state):
        axes = {"in_axes": (0, None), "out_axes": (0, None)}
        return jax.vmap(model, axis_name="batch", **axes)(x, state)

    y, moved = forward(model, X, state)
    index = model.batch.ema_state_index or model.batch.batch_state_index
    mean, _ = moved.get(index)
    assert (y.dtype, mean.dtype) == (BF16, F32)
    assert (mean != state.get(index)[0]).all()


@pytest.mark.parametrize("make", [NnxNet, EquinoxNet])
def test_a_method_of_a_module_is_cast_with_it(make):
    whole_path = Precision("c=f16", keep={"norm.*": "f32", "head.*": "bf16"})
    seen = whole_path.wrap(make().seen)(X[0])
    # The head gets f16, and bf16 and f16 meet in f32.
    assert seen == {"hidden": "float16", "norm": "float16", "head": "float32"}


def test_a_wrapped_module_does_not_show_parameters_that_are_not_cast():
    assert "hidden" not in vars(MIXED.wrap(EquinoxNet()))


# --- what the file loads --------------------------------------------------------------

LOADS = """
import sys
import jax.numpy as jnp
from gradscale.jax.precision import Precision
assert Precision("c=f16").cast_to_compute(jnp.ones(2)).dtype == jnp.float16
print({"flax", "equinox", "optax"} & set(sys.modules))
"""


def test_a_cast_needs_nothing_but_jax():
    done = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
