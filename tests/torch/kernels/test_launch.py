"""Starting compiled kernels directly: when, with what, and what if it fails."""

from itertools import combinations

import pytest
import torch
import triton
import triton.language as tl

from gradscale.errors import GradscaleWarning
from gradscale.torch import GradScaler, optim
from gradscale.torch.kernels import launch as launching
from gradscale.torch.kernels import torch_fused_adam as standing_in
from gradscale.torch.kernels import usable
from gradscale.torch.kernels.launch import Launch, key_of
from tests.torch.training import backward

F32, F16 = torch.zeros(9), torch.zeros(9, dtype=torch.float16)


def body(first_ptr, second_ptr, number, WIDE: tl.constexpr, MORE: tl.constexpr):
    """Stand for a kernel; never run."""


class Compiled:
    """A compiled kernel that writes down how it is started."""

    def __init__(self, started):
        self.started = started

    def __getitem__(self, grid):
        def start(*args, stream):
            self.started.append((grid, args))

        return start


class Kernel:
    """A kernel that Triton would bind and compile; counts how often."""

    def __init__(self, made):
        self.made, self.bound = made, []

    def __getitem__(self, grid):
        def run(*args, **named):
            self.bound.append((grid, args, named))
            return self.made

        return run


@pytest.fixture
def started(monkeypatch):
    """Return what is started directly; let no test change that for the next."""
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    monkeypatch.setattr(launching, "_direct", True)
    return []


def launch_of(made):
    """Return a launch of a kernel that compiles to this."""
    launch = Launch(body, {"num_warps": 4})
    launch._kernel = Kernel(made)
    return launch


def test_a_kernel_is_bound_once_and_then_started_directly(started):
    launch = launch_of(Compiled(started))
    for number in (1.0, 2.0, 3.0):
        launch(7, (F32, F16), (number,), WIDE=True, MORE=2)
    named = {"WIDE": True, "MORE": 2, "num_warps": 4}
    assert launch._kernel.bound == [((7,), (F32, F16, 1.0), named)]
    assert started == [
        ((7, 1, 1), (F32, F16, number, True, 2)) for number in (2.0, 3.0)
    ]


class Bare(Compiled):
    """One that can also be started without anybody hearing of it."""

    function, packed_metadata = "function", "packed"

    def run(self, *args):
        self.started.append(args)


WITHOUT_HOOKS = (7, 1, 1, 5, "function", "packed", None, None, None)


@pytest.fixture
def on_a_stream(monkeypatch):
    monkeypatch.setattr(launching, "_stream_of", lambda pointer: 5)


def test_where_nobody_listens_nothing_is_made_up_for_listeners(started, on_a_stream):
    launch = launch_of(Bare(started))
    for number in (1.0, 2.0):
        launch(7, (F32, F16), (number,), WIDE=True, MORE=2)
    assert started == [(*WITHOUT_HOOKS, F32, F16, 2.0, True, 2)]


@pytest.mark.parametrize("chain", ["launch_enter_hook", "launch_exit_hook"])
def test_listeners_hear_of_every_launch(started, on_a_stream, chain):
    def listen(metadata):
        """Hear of a launch; the stand-in for Triton calls nobody."""

    launch = launch_of(Bare(started))
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    hooks = getattr(triton.knobs.runtime, chain)
    hooks.add(listen)
    try:
        launch(7, (F32, F16), (2.0,), WIDE=True, MORE=2)
    finally:
        hooks.remove(listen)
    launch(7, (F32, F16), (3.0,), WIDE=True, MORE=2)
    assert started == [
        ((7, 1, 1), (F32, F16, 2.0, True, 2)),
        (*WITHOUT_HOOKS, F32, F16, 3.0, True, 2),
    ]


@pytest.mark.parametrize("chain", ["launch_enter_hook", "launch_exit_hook"])
def test_a_listener_in_the_place_of_a_chain_hears_too(
    started, on_a_stream, chain, monkeypatch
):
    launch = launch_of(Bare(started))
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    with monkeypatch.context() as inside:
        inside.setattr(triton.knobs.runtime, chain, lambda metadata: None)
        launch(7, (F32, F16), (2.0,), WIDE=True, MORE=2)
    launch(7, (F32, F16), (3.0,), WIDE=True, MORE=2)
    assert started == [
        ((7, 1, 1), (F32, F16, 2.0, True, 2)),
        (*WITHOUT_HOOKS, F32, F16, 3.0, True, 2),
    ]


def test_a_triton_without_such_chains_starts_in_its_own_way(
    started, on_a_stream, monkeypatch
):
    monkeypatch.setattr(launching, "_CHAINS", ("no_such_hook", "nor_such_hook"))
    launch = launch_of(Bare(started))
    for number in (1.0, 2.0):
        launch(7, (F32, F16), (number,), WIDE=True, MORE=2)
    assert started == [((7, 1, 1), (F32, F16, 2.0, True, 2))]


def test_without_a_stream_triton_finds_one(started):
    launch = launch_of(Bare(started))
    for number in (1.0, 2.0):
        launch(7, (F32, F16), (number,), WIDE=True, MORE=2)
    assert started == [((7, 1, 1), (F32, F16, 2.0, True, 2))]


def test_what_was_compiled_for_others_is_not_started(started):
    launch = launch_of(Compiled(started))
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    launch(8, (F32, F16), (1.0,), WIDE=True, MORE=2)
    launch(7, (F32, F32), (1.0,), WIDE=True, MORE=2)
    launch(7, (F32, F16), (1,), WIDE=True, MORE=2)
    launch(7, (F32, F16), (1.0,), WIDE=False, MORE=2)
    assert len(launch._kernel.bound) == 5
    assert started == []


def test_a_kernel_of_the_interpreter_is_always_run_by_it(started):
    launch = launch_of(None)
    for _ in range(3):
        launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    assert len(launch._kernel.bound) == 3


def test_tables_that_always_change_their_size_do_not_pile_up(started):
    launch = launch_of(Compiled(started))
    for programs in range(1, 3 * launching.LAUNCHERS):
        launch(programs, (F32, F16), (1.0,), WIDE=True, MORE=2)
    assert len(launch._launchers) <= launching.LAUNCHERS


def test_constants_out_of_order_are_refused(started):
    with pytest.raises(AssertionError):
        launch_of(None)(7, (F32, F16), (1.0,), MORE=2, WIDE=True)


@pytest.mark.parametrize("kind", [TypeError, AttributeError])
def test_a_triton_that_starts_kernels_otherwise_is_said_once(started, kind):
    class Otherwise(Compiled):
        def __getitem__(self, grid):
            def run(*args, stream):
                started.append(args)
                raise kind("takes 9 arguments")

            return run

    launch = launch_of(Otherwise(started))
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    with pytest.warns(
        GradscaleWarning, match=r"takes 9 arguments.*results are the same.*GS110"
    ):
        launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    # A second warning would be an error.
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    assert len(started) == 1
    assert len(launch._kernel.bound) == 3


def test_a_kernel_that_cannot_be_kept_was_launched_all_the_same(started):
    class Unkept(Compiled):
        def __getitem__(self, grid):
            raise TypeError("not subscriptable")

    launch = launch_of(Unkept(started))
    with pytest.warns(GradscaleWarning, match=r"not subscriptable.*GS110"):
        launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    # A second warning would be an error.
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    assert len(launch._kernel.bound) == 2


def test_a_kernel_that_fails_is_not_launched_again(started):
    class Failing(Compiled):
        def __getitem__(self, grid):
            def run(*args, stream):
                raise RuntimeError("Triton Error [CUDA]: out of memory")

            return run

    launch = launch_of(Failing(started))
    launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        launch(7, (F32, F16), (1.0,), WIDE=True, MORE=2)
    assert len(launch._kernel.bound) == 1
    assert launching._direct


# Whatever Triton may specialise on: dtype, alignment, width, values such as 1 and 16.
ARGUMENTS = {
    "f32": F32,
    "misaligned f32": F32[1:],
    "f16": F16,
    "misaligned f16": F16[1:],
    "i32": F32.view(torch.int32),
    "i64": torch.zeros(2, dtype=torch.int64),
    "0": 0,
    "1": 1,
    "16": 16,
    "largest i32": 2**31 - 1,
    "smallest i64": 2**31,
    "2**40": 2**40,
    "1.0": 1.0,
    "16.0": 16.0,
}


def triton_kind(argument):
    """Return what Triton itself compiles an argument for that it may not specialise."""
    jit = pytest.importorskip("triton.runtime.jit")
    specialise = getattr(jit, "native_specialize_impl", None)
    if specialise is None:
        pytest.skip("this Triton keeps its look at arguments elsewhere")
    from triton.backends.compiler import BaseBackend

    return specialise(BaseBackend, argument, False, False, True)


def own_kind(argument):
    """Return the key of a launch whose only other argument is always the same."""
    if isinstance(argument, torch.Tensor):
        return key_of((F32, argument), (), ())
    return key_of((F32,), (argument,), ())


# A number and a pointer never stand at the same place.
PAIRS = [
    pair
    for pair in combinations(ARGUMENTS, 2)
    if len({isinstance(ARGUMENTS[name], torch.Tensor) for name in pair}) == 1
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_launches_share_a_kernel_exactly_where_triton_would(one, other):
    a, b = ARGUMENTS[one], ARGUMENTS[other]
    assert (own_kind(a) == own_kind(b)) is (triton_kind(a) == triton_kind(b))


def test_triton_is_told_to_specialise_on_nothing_but_constants(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    params = Launch(body, {})._kernel.params
    told = {p.name: (p.do_not_specialize, p.is_constexpr) for p in params}
    assert told == {
        "first_ptr": (True, False),
        "second_ptr": (True, False),
        "number": (True, False),
        "WIDE": (False, True),
        "MORE": (False, True),
    }


OURS = "_read", "_gather_and_decide", "_adam", "_count", "_update"
STEPS = {
    "own": (lambda p: optim.AdamW(p, kernels="triton"), OURS),
    "fused": (
        lambda p: torch.optim.AdamW(p, fused=True),
        ("_read", "_gather_and_decide", "_adam", "_take_back", "_update"),
    ),
}


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize(("make", "launches"), STEPS.values(), ids=STEPS)
def test_a_step_takes_as_few_launches_as_it_can(
    device, monkeypatch, make, launches, clipped
):
    seen, call = [], Launch.__call__
    monkeypatch.setattr(standing_in, "FEW", 0)

    def noted(self, *args, **constants):
        seen.append(self.body.__name__)
        call(self, *args, **constants)

    params = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    optimizer, scaler = make(params), GradScaler(device.type, kernels="triton")
    for param in params:
        backward(scaler, param, torch.ones(5, device=device))
    # The probe runs once for a device.
    assert usable("triton", device)
    monkeypatch.setattr(Launch, "__call__", noted)
    if clipped:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert tuple(seen) == launches
