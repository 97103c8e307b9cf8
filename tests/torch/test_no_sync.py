"""No host sync: no value is read from the device, except where that is documented."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale.torch import GradScaler
from gradscale.torch.device_state import update as updating
from gradscale.torch.device_state.async_copy import LAG, PERIOD, RowCopies
from gradscale.torch.grads import stats
from tests.torch.training import FUSED, INF, PLAIN, CustomFused, parameter, planted

# Every operator that takes a value, or a shape that depends on values, to the host.
SYNCS = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """Run the operations of an accelerator: those of a CPU read host memory."""
    monkeypatch.setattr(updating, "_ops_for", updating._on_device)
    monkeypatch.setattr(
        stats, "read_on_host", lambda grads, norm, _: stats.read_on_device(grads, norm)
    )


class SyncCount(TorchDispatchMode):
    """Counts the operators that would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in SYNCS or (name.startswith("index") and _has_mask(args)):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(args):
    leaves = tree_leaves(args)
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in leaves)


class ListCount(TorchFunctionMode):
    """Counts the methods that no dispatch mode sees."""

    names = ("tolist", "numpy", "cpu", "__array__")

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.names:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["tolist", "numpy", "cpu"])
def test_the_other_counter_sees_calls_that_make_a_list(name):
    with ListCount() as lists:
        getattr(torch.ones(2), name)()
    assert lists.seen == {name: 1}


@pytest.mark.parametrize(
    ("sync", "name"),
    [
        (lambda t: t.sum().item(), "_local_scalar_dense"),
        (lambda t: float(t.sum()), "_local_scalar_dense"),
        (lambda t: bool(t.sum() > 0), "_local_scalar_dense"),
        (lambda t: torch.equal(t, t), "equal"),
        (lambda t: t.nonzero(), "nonzero"),
        (lambda t: t[t > 0], "index"),
        (lambda t: torch.masked_select(t, t > 0), "masked_select"),
        (lambda t: t.unique(), "_unique2"),
    ],
)
def test_the_counter_sees_a_sync(sync, name):
    with SyncCount() as syncs:
        sync(torch.ones(2))
    assert syncs.seen[name] >= 1


def test_the_counter_sees_none_where_there_is_none():
    with SyncCount() as syncs:
        torch.where(torch.ones(2) > 0, 1.0, 0.0).sum().mul_(2.0)
    assert syncs.seen == {}


def _iteration(scaler, optimizer, param, grad, clip, unscale):
    """Run one whole iteration under the counter; return what it saw."""
    optimizer.zero_grad()
    with SyncCount() as syncs:
        scaler.scale(planted(param, grad)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip == "optimizer":
            scaler.clip_grad_norm_(optimizer, 1.0)
        if clip == "parameters":
            scaler.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        scaler.update()
    return syncs.seen


STATE = GradScaler("cpu").state_dict()


def resumed():
    """Return a scaler whose first step does not read the optimizer's step counts."""
    scaler = GradScaler("cpu")
    scaler.load_state_dict(STATE)
    return scaler


# CustomFused reads the flag itself, to write it down.
KERNELS = {name: make for name, make in FUSED.items() if make is not CustomFused}
ways = pytest.mark.parametrize("clip", [None, "optimizer", "parameters"])
grads = pytest.mark.parametrize("grad", [1.0, INF])
moments = pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])


@ways
@grads
@moments
@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_a_whole_step_with_a_fused_optimizer_has_none(make, grad, clip, unscale):
    scaler, param = resumed(), parameter(3)
    optimizer = make([param], lr=1.0)
    # Rows of the first steps are judged within these.
    for _ in range(PERIOD + LAG):
        assert _iteration(scaler, optimizer, param, grad, clip, unscale) == {}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_a_sampled_step_whose_gradients_were_written_to_has_none(make):
    scaler, param = resumed(), parameter(3)
    optimizer = make([param], lr=1.0)
    sampled = 0
    # The loop check copies two sizes, and has read those of the first steps by then.
    for _ in range(12):
        sampled += scaler._monitor.loop.due
        optimizer.zero_grad()
        with SyncCount() as syncs:
            scaler.scale(planted(param, 1.0)).backward()
            param.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
        assert syncs.seen == {}
    assert sampled == 8


@ways
@grads
@moments
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_whole_step_with_a_plain_optimizer_has_one(make, grad, clip, unscale):
    scaler, param = resumed(), parameter(3)
    optimizer = make([param], lr=1.0)
    for _ in range(PERIOD + LAG):
        seen = _iteration(scaler, optimizer, param, grad, clip, unscale)
        # Adam's step counters are on the host: its own reads are not the scaler's.
        assert seen == Counter(_local_scalar_dense=1) + _own(make, grad)


def _own(make, grad):
    """Return what the optimizer alone does."""
    if grad == INF:
        return Counter()
    param = parameter(3)
    optimizer = make([param], lr=1.0)
    param.grad = torch.ones(3)
    with SyncCount() as syncs:
        optimizer.step()
    return syncs.seen


@pytest.mark.parametrize(("skips", "count"), [(0, 1), (2, 3)])
def test_fused_sgd_with_dampening_reads_the_flag_until_it_has_buffers(skips, count):
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.SGD(
        [param], lr=1.0, momentum=0.5, dampening=0.5, fused=True
    )
    seen = Counter()
    for grad in [INF] * skips + [1.0] * 3:
        seen += _iteration(scaler, optimizer, param, grad, None, False)
    assert seen == {"_local_scalar_dense": count}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_with_momentum_has_none(momentum):
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=momentum, fused=True)
    assert _iteration(scaler, optimizer, param, INF, None, False) == {}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_only_copies_of_rows_make_lists(make, monkeypatch):
    monkeypatch.setattr(RowCopies, "advance", lambda self, state: [])
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = make([param], lr=1.0)
    with ListCount() as lists:
        for grad in (1.0, INF, 1.0, 1.0, 1.0, 1.0, 1.0):
            _iteration(scaler, optimizer, param, grad, "optimizer", False)
    assert lists.seen == {}


def test_rows_are_read_once_a_period_after_the_lag():
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.AdamW([param], fused=True)
    seen = []
    for update in range(1, 3 * PERIOD):
        with ListCount() as lists:
            _iteration(scaler, optimizer, param, 1.0, "optimizer", False)
        if lists.seen:
            seen.append(update)
    assert seen == [PERIOD + LAG, 2 * PERIOD + LAG]


def test_two_fused_optimizers_have_none():
    scaler, a, b = GradScaler("cpu"), parameter(3), parameter(3)
    first = torch.optim.AdamW([a], fused=True)
    second = torch.optim.SGD([b], lr=1.0, fused=True)
    with SyncCount() as syncs:
        scaler.scale(planted(a, 1.0) + planted(b, INF)).backward()
        scaler.clip_grad_norm_([first, second], 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert syncs.seen == {}
    assert scaler.last[second].applied is False


def test_asking_for_the_outcome_has_none_until_it_is_read():
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.AdamW([param], fused=True)
    _iteration(scaler, optimizer, param, INF, None, False)
    with SyncCount() as syncs:
        last = scaler.last
    assert syncs.seen == {}
    assert last.applied is False


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.reset(),
        lambda s: s.update(8.0),
        lambda s: s.load_state_dict(STATE),
        lambda s: s._get_scale_async(),
        lambda s: s.policy,
    ],
)
def test_these_calls_do_not_sync(call):
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with SyncCount() as syncs:
        call(scaler)
    assert syncs.seen == {}


def test_get_scale_has_one():
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with SyncCount() as syncs:
        scaler.get_scale()
    assert syncs.seen == {"_local_scalar_dense": 1}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_nothing_is_written_into_gradients_before_a_fused_step(make, clip):
    scaler, params = GradScaler("cpu"), [parameter(3), parameter(20000)]
    optimizer = make(params, lr=1.0)
    scaler.scale(sum(planted(param, 1.0) for param in params)).backward()
    before = [(param.grad, param.grad._version) for param in params]
    at_step = []
    optimizer.register_step_pre_hook(
        lambda *_: at_step.extend((param.grad, param.grad._version) for param in params)
    )
    if clip is not None:
        scaler.clip_grad_norm_(optimizer, clip)
    scaler.step(optimizer)
    assert [(id(grad), version) for grad, version in at_step] == [
        (id(grad), version) for grad, version in before
    ]
