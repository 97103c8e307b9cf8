"""Kinds of models whose training fails for 20 steps, for `test_kinds_of_models`."""

import copy
import io
import pickle
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.nn.quantized import dynamic as quantized
from torch.fx import symbolic_trace
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH = 4
GOOD_BEFORE, BAD, GOOD_AFTER = 5, 20, 10
STEPS = GOOD_BEFORE + BAD + GOOD_AFTER
# The hooks are enabled from about here on.
LATE = GOOD_BEFORE + 12

KINDS = {}


class Kind:
    """A model, its loss on a batch, and what happens between two steps."""

    # Whether the scaler enables the hooks.
    hooked = True

    def __init__(self, model=None):
        self.model = mlp() if model is None else model
        # Numbers that must be the same under any scaler.
        self.notes = []

    def between(self, step):
        """Do what the script does before a step."""

    def loss(self, x):
        """Return the loss of a batch."""
        return self.model(x).square().mean()


def kind(name):
    """Enter a function or class that makes a kind under a name."""

    def enter(make):
        assert name not in KINDS, name
        KINDS[name] = make
        return make

    return enter


def is_bad(step):
    """Return whether the batch of a step is not finite."""
    return GOOD_BEFORE <= step < GOOD_BEFORE + BAD


def batch(step):
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, WIDTH, generator=generator)
    if is_bad(step):
        x[0, 0] = torch.nan
    return x


def mlp():
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Body(nn.Module):
    """An inner layer, a function around it, and a head."""

    def __init__(self, forward=None, inner=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if inner is None else inner
        self.head = nn.Linear(WIDTH, 1)
        self._around = forward

    def forward(self, x):
        """Apply the inner layer by the given function, then the head."""
        return self.head(self._around(self.inner, x))


class Emit(nn.Module):
    """Returns the output of a linear layer in an object."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, x):
        """Return the wrapped output."""
        return self.wrap(self.linear(x))


def odd_output(name, wrap, unwrap):
    """Enter a kind in which a module passes its output on in an object."""

    def around(inner, x):
        return unwrap(inner(x))

    KINDS[name] = lambda: Kind(Body(around, Emit(wrap)))


# --- plain ----------------------------------------------------------------------------

kind("plain")(Kind)


@kind("shared modules")
def _shared():
    layer = nn.Linear(WIDTH, WIDTH)
    return Kind(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(WIDTH, 1)))


@kind("module called twice")
def _twice():
    return Kind(Body(lambda inner, x: inner(inner(x))))


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=3):
        """Apply the layer `depth` times."""
        return x if depth == 0 else self(self.linear(x).tanh(), depth - 1)


kind("recursive module")(lambda: Kind(Recursive()))


class Nested(nn.Module):
    """A module around a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Call the inner module."""
        return self.inner(x)


@kind("nested almost to the limit of the stack")
def _nested():
    model = mlp()
    # Four levels of the stack each, out of 1000; five with hooks.
    for _ in range(190):
        model = Nested(model)
    return Kind(model)


@kind("lists of modules")
class _Lists(Kind):
    def __init__(self):
        super().__init__(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def loss(self, x):
        for layer in self.model:
            x = layer(x).tanh()
        return x.square().mean()


@kind("in-place output")
def _in_place():
    return Kind(Body(lambda inner, x: inner(x).add_(1.0).relu_()))


@kind("views")
def _views():
    return Kind(Body(lambda inner, x: inner(x).t().flip(0)[1:].new_ones(1) * inner(x)))


@kind("view of the output written to")
def _written_view():
    def around(inner, x):
        out = inner(x)
        out[:, 0].mul_(2.0)
        return out

    return Kind(Body(around))


class Custom(torch.autograd.Function):
    """Multiplies by two, without a gradient for its second input."""

    @staticmethod
    def forward(ctx, x, unused):
        """Return twice the input."""
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        """Return twice the gradient."""
        return grad * 2.0, None


@kind("custom function")
def _custom():
    return Kind(Body(lambda inner, x: Custom.apply(inner(x), None)))


@kind("gradient penalty")
class _Penalty(Kind):
    def loss(self, x):
        x = x.requires_grad_()
        out = self.model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + grad.square().mean()


@kind("several losses")
class _Several(Kind):
    def loss(self, x):
        first = self.model(x).square().mean()
        return first + self.model(x * 2.0).abs().mean()


@kind("batch norm and dropout")
def _norm():
    return Kind(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, 1),
        )
    )


@kind("attention")
def _attention():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True)
    return Kind(
        Body(lambda inner, x: inner(x[None])[0], nn.TransformerEncoder(layer, 1))
    )


@kind("recurrent")
def _recurrent():
    inner = nn.LSTM(WIDTH, WIDTH)
    return Kind(Body(lambda inner, x: inner(x[:, None])[0][:, 0], inner))


# --- outputs --------------------------------------------------------------------------


@dataclass
class Output:
    """A tensor in a dataclass."""

    hidden: Tensor


@dataclass(slots=True)
class SlottedData:
    """A tensor in a dataclass with slots."""

    hidden: Tensor


class Slotted:
    """A tensor in a slot."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Named(NamedTuple):
    """A tensor in a named tuple."""

    hidden: Tensor


class Guarded(dict):
    """A dict that cannot be iterated."""

    def __iter__(self):
        """Fail."""
        raise RuntimeError("iterated")

    values = items = keys = __iter__


class Raising:
    """An object whose unknown attributes raise something else."""

    def __init__(self, hidden):
        self.__dict__["hidden"] = hidden

    def __getattr__(self, name):
        """Fail."""
        raise KeyError(name)


class Lying:
    """An object that denies its class."""

    def __init__(self, hidden):
        self.hidden = hidden

    @property
    def __class__(self):
        """Fail."""
        raise ValueError("no class")


def _around_itself(hidden):
    cycle = [hidden]
    cycle.append(cycle)
    return cycle


def _hidden(output):
    return output.hidden


odd_output("dataclass", Output, _hidden)
odd_output("dataclass with slots", SlottedData, _hidden)
odd_output("slots", Slotted, _hidden)
odd_output("named tuple", Named, _hidden)
odd_output(
    "ordered dict",
    lambda h: OrderedDict(b=h, a=[None, {"c": 1}]),
    lambda output: output["b"],
)
odd_output("dict that raises", lambda h: Guarded(h=h), lambda output: output["h"])
odd_output("raising __getattr__", Raising, _hidden)
odd_output("raising __class__", Lying, _hidden)
odd_output("generator", lambda h: (part for part in (h, h)), next)
odd_output("list in itself", _around_itself, lambda output: output[0])
odd_output("function", lambda h: lambda: h, lambda output: output())
odd_output("strings and numbers", lambda h: ("a", 1, h, b"b"), lambda output: output[2])
odd_output("complex output", lambda h: torch.complex(h, -h).conj(), torch.real)
odd_output(
    "integer output",
    lambda h: (h, h.detach().nan_to_num().long(), h > 0, h.detach().to(torch.int8)),
    lambda output: output[0] * output[1],
)
odd_output("empty output", lambda h: (h, h[:0]), lambda output: output[0])
odd_output("scalar output", lambda h: h.mean(), lambda h: h.expand(4, WIDTH))
odd_output("sparse output", lambda h: h.to_sparse(), lambda h: h.to_dense())
odd_output(
    "nested tensor output",
    lambda h: torch.nested.as_nested_tensor([h], layout=torch.jagged),
    lambda h: h.unbind()[0],
)
odd_output("float64 and half", lambda h: (h.double(), h.half()), lambda o: o[0].float())


class Silent(nn.Module):
    """Returns None and keeps its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Keep the output."""
        self.kept = self.linear(x)


@kind("None")
def _none():
    def around(inner, x):
        assert inner(x) is None
        return inner.kept

    return Kind(Body(around, Silent()))


class Doubled(Tensor):
    """A subclass of Tensor."""


odd_output(
    "tensor subclass", lambda h: h.as_subclass(Doubled), lambda h: h.as_subclass(Tensor)
)


# --- what is done to the model --------------------------------------------------------


@kind("hooks of the user")
def _hooks():
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2.0)
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1.0,))
    model[2].register_full_backward_hook(lambda module, grads, out: None)
    model.register_forward_hook(
        lambda module, inputs, kwargs, output: output + 1.0, with_kwargs=True
    )
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    return Kind(model)


@kind("hooks of the user, removed by force")
class _Cleared(Kind):
    def between(self, step):
        for module in self.model.modules():
            module._forward_hooks.clear()


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x):
        """Return the symmetric part."""
        return x.triu() + x.triu(1).transpose(-1, -2)


@kind("parametrization")
def _parametrized():
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return Kind(model)


@kind("weight norm")
def _weight_norm():
    model = mlp()
    parametrizations.weight_norm(model[0])
    return Kind(model)


@kind("spectral norm")
def _spectral_norm():
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return Kind(model)


@kind("module replaced")
class _Replaced(Kind):
    def between(self, step):
        if step % 6 == 5:
            new = nn.Linear(WIDTH, WIDTH)
            new.weight, new.bias = self.model[0].weight, self.model[0].bias
            self.model[0] = new


@kind("parameter exchanged")
class _Exchanged(Kind):
    def between(self, step):
        self.model[0].weight.data = self.model[0].weight.data.clone()


@kind("deep copy in between")
class _Copied(Kind):
    def between(self, step):
        twin = copy.deepcopy(self.model)
        self.notes.append(twin(torch.ones(1, WIDTH)).item())


@kind("pickle in between")
class _Pickled(Kind):
    def between(self, step):
        twin = pickle.loads(pickle.dumps(self.model))
        self.notes.append(twin(torch.ones(1, WIDTH)).item())
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        self.notes.append(twin(torch.ones(1, WIDTH)).item())


@kind("shallow copy in between")
class _Replicas(Kind):
    # As DataParallel makes its replicas.
    def loss(self, x):
        replica = self.model._replicate_for_data_parallel()
        for name, child in self.model._modules.items():
            replica._modules[name] = child._replicate_for_data_parallel()
            for key, param in child.named_parameters(recurse=False):
                setattr(replica._modules[name], key, param)
        return replica(x).square().mean()


@kind("DataParallel")
class _DataParallel(Kind):
    def __init__(self):
        super().__init__()
        self.wrapped = nn.DataParallel(self.model)

    def loss(self, x):
        return self.wrapped(x).square().mean()


@kind("model that is dropped")
class _Dropped(Kind):
    def between(self, step):
        if step == LATE:
            dead = weakref.ref(self.model)
            state = self.model.state_dict()
            parameters = dict(self.model.named_parameters())
            self.model = None
            self.notes.append(dead() is None)
            self.model = mlp()
            self.model.load_state_dict(state)
            for name, module in self.model.named_children():
                for key in list(module._parameters):
                    setattr(module, key, parameters[f"{name}.{key}"])


@kind("scripted submodule")
def _scripted():
    return Kind(
        Body(lambda inner, x: inner(x), torch.jit.script(nn.Linear(WIDTH, WIDTH)))
    )


@kind("scripted model")
class _AllScripted(Kind):
    hooked = False

    def __init__(self):
        super().__init__(torch.jit.script(mlp()))

    def loss(self, x):
        # Otherwise the first calls take other kernels than later ones.
        with torch.jit.optimized_execution(False):
            return self.model(x).square().mean()


@kind("traced in between")
class _Traced(Kind):
    def between(self, step):
        if step % 5 == 0:
            traced = torch.jit.trace(self.model, torch.ones(1, WIDTH))
            self.notes += [node.kind() for node in traced.inlined_graph.nodes()]


@kind("symbolic trace in between")
class _SymbolicTrace(Kind):
    def between(self, step):
        if step % 5 == 0:
            self.notes.append(str(symbolic_trace(self.model).graph))


@kind("exported in between")
class _Exported(Kind):
    def between(self, step):
        if step == LATE:
            x = torch.ones(1, WIDTH)
            exported = torch.export.export(self.model, (x,), strict=False)
            self.notes.append(str(exported.graph))


@kind("dynamically quantised submodule")
def _quantised():
    frozen = quantized.Linear.from_float(_with_observer(nn.Linear(WIDTH, WIDTH)))
    return Kind(Body(lambda inner, x: inner(x), Quantised(frozen)))


class Quantised(nn.Module):
    """A trained layer and a quantised one."""

    def __init__(self, frozen):
        super().__init__()
        self.linear, self.frozen = nn.Linear(WIDTH, WIDTH), frozen

    def forward(self, x):
        """Add the outputs of both."""
        return self.linear(x) + self.frozen(x.detach().nan_to_num())


def _with_observer(linear):
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return linear


# --- transforms and modes -------------------------------------------------------------


@kind("vmap")
def _vmap():
    return Kind(Body(lambda inner, x: torch.vmap(inner)(x)))


@kind("functional_call")
class _Functional(Kind):
    def loss(self, x):
        params = dict(self.model.named_parameters())
        return torch.func.functional_call(self.model, params, (x,)).square().mean()


@kind("grad inside forward")
def _inner_grad():
    def around(inner, x):
        energy = torch.func.grad(lambda point: inner(point).square().sum())
        return energy(x)

    return Kind(Body(around))


@kind("ensemble by vmap")
class _Ensemble(Kind):
    def __init__(self):
        super().__init__(nn.ModuleList([mlp(), mlp()]))

    def loss(self, x):
        def run(params, x):
            return torch.func.functional_call(self.model[0], params, (x,))

        named = [dict(each.named_parameters()) for each in self.model]
        params = {key: torch.stack([n[key] for n in named]) for key in named[0]}
        return torch.vmap(run, (0, None))(params, x).square().mean()


@kind("gradients of each sample in between")
class _PerSample(Kind):
    def between(self, step):
        params = {k: v.detach() for k, v in self.model.named_parameters()}

        def loss(params, x):
            out = torch.func.functional_call(self.model, params, (x[None],))
            return out.square().mean()

        grads = torch.vmap(torch.func.grad(loss), (None, 0))(params, batch(0))
        self.notes.append(grads["0.weight"].sum().item())


@kind("jvp in between")
class _Jvp(Kind):
    def between(self, step):
        x = batch(0)
        _, tangent = torch.func.jvp(self.model, (x,), (torch.ones_like(x),))
        self.notes.append(tangent.sum().item())


@kind("compiled, held elsewhere")
class _Compiled(Kind):
    def __init__(self):
        super().__init__()
        torch._dynamo.reset()
        self.graphs = 0
        self.compiled = torch.compile(self.model, backend=self._count, fullgraph=True)

    def _count(self, graph, inputs):
        self.graphs += 1
        return graph.forward

    def loss(self, x):
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            out = self.forward(x)
        self.notes.append((self.compilations(), [str(w.message) for w in issued]))
        return out.square().mean()

    def forward(self, x):
        return self.compiled(x)

    def compilations(self):
        return self.graphs


@kind("compiled during the failure")
class _CompiledLate(_Compiled):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.compiled(x) if self.steps > LATE else self.model(x)

    def compilations(self):
        # Compiled with hooks, it is compiled again without them: the same graph.
        return self.graphs > 0


@kind("compiled training step")
class _CompiledStep(_Compiled):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(
            lambda x: self.model(x).square(), backend=self._count, fullgraph=True
        )


@kind("compiled submodule")
class _CompiledPart(Kind):
    hooked = False

    def __init__(self):
        super().__init__()
        self.model[0].compile(backend="eager")


@kind("checkpoint")
def _checkpoint():
    return Kind(Body(partial(checkpoint, use_reentrant=False)))


@kind("reentrant checkpoint")
def _reentrant():
    def around(inner, x):
        return checkpoint(inner, x.requires_grad_(), use_reentrant=True)

    return Kind(Body(around))


@kind("selective checkpoint")
def _selective():
    def policy(context, op, *args, **kwargs):
        saved = op is torch.ops.aten.addmm.default
        return (
            CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        )

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def around(inner, x):
        return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)

    return Kind(Body(around, mlp().append(nn.Linear(1, WIDTH))))


class CountFunctions(TorchFunctionMode):
    """Counts the functions that are called."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Count a call."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    """Counts the operators that are called."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count a call."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _Counted(Kind):
    mode: Any

    def loss(self, x):
        with self.mode() as mode:
            loss = self.model(x).square().mean()
        self.notes.append(mode.calls)
        return loss


kind("function mode")(type("_Functions", (_Counted,), {"mode": CountFunctions}))
kind("dispatch mode")(type("_Operators", (_Counted,), {"mode": CountOperators}))


@kind("fake tensors in between")
class _Fake(Kind):
    def between(self, step):
        if step % 4 == 0:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                out = self.model(mode.from_tensor(torch.ones(1, WIDTH)))
            self.notes.append(tuple(out.shape))


@kind("meta copy in between")
class _Meta(Kind):
    def between(self, step):
        if step % 4 == 0:
            twin = copy.deepcopy(self.model).to("meta")
            out = twin(torch.ones(1, WIDTH, device="meta"))
            self.notes.append(tuple(out.shape))


@kind("saved tensors packed")
class _Packed(Kind):
    def loss(self, x):
        packed = []

        def pack(tensor):
            packed.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(x).square().mean()
        self.notes.append(packed)
        return loss


@kind("autocast on and off")
class _Autocast(Kind):
    steps = 0

    def loss(self, x):
        self.steps += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.steps % 2 == 0):
            return self.model(x).float().square().mean()


@kind("anomaly detection")
class _Anomaly(Kind):
    def loss(self, x):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return self.model(x).square().mean()


# --- evaluation, threads, exceptions --------------------------------------------------


class _Evaluated(Kind):
    def __init__(self, context=torch.no_grad, evaluate=True, model=None):
        super().__init__(model)
        self.context, self.evaluate = context, evaluate

    def between(self, step):
        self.model.train(not self.evaluate)
        with self.context():
            self.notes.append(self.model(batch(0)).sum().item())
        self.model.train()


kind("evaluation in between")(_Evaluated)
kind("evaluation of attention in between")(lambda: _Evaluated(model=_attention().model))
kind("inference mode in between")(lambda: _Evaluated(torch.inference_mode))
kind("evaluation with gradients in between")(lambda: _Evaluated(torch.enable_grad))
kind("no_grad pass in training mode in between")(lambda: _Evaluated(evaluate=False))


@kind("trained in evaluation mode")
class _TrainedInEvaluation(Kind):
    def between(self, step):
        self.model.eval()


@kind("frozen part without gradients")
def _frozen():
    def around(inner, x):
        with torch.no_grad():
            features = inner(x)
        return inner(x) + features

    return Kind(Body(around))


class _Threaded(Kind):
    """Threads that run modules all the time."""

    def __init__(self, own):
        super().__init__()
        self.other = mlp() if own else self.model
        self.running, self.end = True, time.monotonic() + 20.0
        self.failures = []
        self.threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def _run(self):
        try:
            while self.running and time.monotonic() < self.end:
                self.other(torch.ones(1, WIDTH))
                time.sleep(0.0002)
        except Exception as error:
            self.failures.append(error)

    def between(self, step):
        if step == STEPS - 1:
            self.running = False
            for thread in self.threads:
                thread.join()
            self.notes.append(self.failures)


kind("threads that run other modules")(partial(_Threaded, own=True))
kind("threads that run the same modules")(partial(_Threaded, own=False))


@kind("trained in changing threads")
class _ChangingThreads(Kind):
    def loss(self, x):
        losses = []
        thread = threading.Thread(
            target=lambda: losses.append(self.model(x).square().mean())
        )
        thread.start()
        thread.join()
        return losses[0]


@kind("exception in forward")
class _Exceptions(Kind):
    def between(self, step):
        try:
            self.model(torch.ones(1, WIDTH + 1))
        except RuntimeError as error:
            self.notes.append(str(error))


@kind("interrupt in forward")
class _Interrupted(Kind):
    def __init__(self):
        def around(inner, x):
            if x.numel() == 1:
                raise KeyboardInterrupt
            return inner(x)

        super().__init__(Body(around))

    def between(self, step):
        try:
            self.model(torch.ones(1))
        except KeyboardInterrupt:
            self.notes.append(step)
