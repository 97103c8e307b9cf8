"""The looks in C++ answer what those in Python answer."""

import faulthandler
import gc
import os
import signal
import sys
import weakref
from array import array
from collections import OrderedDict, defaultdict
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradscale.torch import looks
from gradscale.torch.looks import building, plain
from tests.torch.training import sparse

# The library is made once and has no state.
TWINS = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True, params=["alone", "with helpers"])
def _crew(request, looks_in_cpp):
    """Run each test with one thread, and with some that share every look."""
    looks_in_cpp.set_crew(*((0, -1) if request.param == "alone" else (3, 1)))
    # A helper that asked for the GIL would wait forever, and everybody with it.
    faulthandler.dump_traceback_later(300.0, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    looks_in_cpp.set_crew(-1, -1)


class Special(Tensor):
    """A subclass, of which nothing is known."""


class Answering(Tensor):
    """A subclass for which Python answers, even when asked for its strides."""

    asked: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="strides"
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        inner = [getattr(one, "inner", one) for one in args]
        return func(*inner, **(kwargs or {}))


def holding(grad, *, kind=torch.nn.Parameter):
    """Return a parameter with this gradient, or with none."""
    like = torch.zeros(3) if grad is None else grad
    data = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    param = kind(data) if kind is not Tensor else data.requires_grad_()
    param.grad = grad
    return param


BUFFER = torch.zeros(64)
SHARED = torch.ones(3)
PARAMS = {
    "none": lambda: holding(None),
    "none of a tensor": lambda: holding(None, kind=Tensor),
    "dense": lambda: holding(torch.ones(3)),
    "another": lambda: holding(torch.ones(2, 5)),
    "scalar": lambda: holding(torch.ones(())),
    "of a tensor": lambda: holding(torch.ones(3), kind=Tensor),
    "written": lambda: holding(torch.ones(3).mul_(2.0).add_(1.0)),
    "f16": lambda: holding(torch.ones(3, dtype=torch.float16)),
    "bf16": lambda: holding(torch.ones(3, dtype=torch.bfloat16)),
    "f64": lambda: holding(torch.ones(3, dtype=torch.float64)),
    "complex": lambda: holding(torch.ones(3, dtype=torch.complex64)),
    "empty": lambda: holding(torch.ones(0)),
    "view": lambda: holding(BUFFER[:7]),
    "another view": lambda: holding(BUFFER[8:16]),
    "shared": lambda: holding(SHARED),
    "across": lambda: holding(torch.ones(2, 3).t()),
    "by columns": lambda: holding(torch.empty_strided((2, 3), (1, 2)).fill_(1.0)),
    "sparse": lambda: holding(sparse([1], [1.0], 3)),
    "meta": lambda: holding(torch.ones(3, device="meta")),
    "subclass": lambda: holding(torch.ones(3).as_subclass(Special)),
    "of a subclass": lambda: torch.zeros(3).as_subclass(Special).requires_grad_(),
    "a parameter": lambda: holding(torch.nn.Parameter(torch.ones(3))),
    "copied on write": lambda: holding(torch._lazy_clone(torch.ones(3))),
}
ORDINARY = ["none", "none of a tensor", "dense", "another", "scalar", "of a tensor"]
ORDINARY += ["written", "copied on write"]
MIXES = st.one_of(
    st.lists(st.sampled_from(list(PARAMS)), max_size=5),
    st.lists(st.sampled_from([*ORDINARY, "view", "another view"]), max_size=200),
    st.lists(st.sampled_from(ORDINARY), max_size=200),
)


def alike(one, other):
    """Return whether two answers of `gather` are the same."""
    if one is None or other is None:
        return one is other
    lists = [(one[i], other[i]) for i in (0, 1)]
    return all(plain.same(*pair) for pair in lists) and one[2:] == other[2:]


# --- gather ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("allow_fp16", [False, True])
def test_one_gradient_is_gathered_alike(looks_in_cpp, name, allow_fp16):
    params = [PARAMS[name]()]
    told = looks_in_cpp.gather(params, allow_fp16, None, None)
    assert alike(told, plain.gather(params, allow_fp16, None, None))


@given(mix=MIXES, allow_fp16=st.booleans())
@TWINS
def test_a_mix_is_gathered_alike(looks_in_cpp, mix, allow_fp16):
    params = [PARAMS[name]() for name in mix]
    told = looks_in_cpp.gather(params, allow_fp16, None, None)
    assert alike(told, plain.gather(params, allow_fp16, None, None))


@given(mix=st.lists(st.sampled_from(["view", "shared", "dense", "bf16"]), min_size=1))
@TWINS
def test_what_lies_where_it_lay_is_gathered_alike(looks_in_cpp, mix):
    params = [PARAMS[name]() for name in mix]
    grads = [param.grad for param in params]
    for kind in [(grads[0].device, grads[0].dtype), (grads[0].device, torch.float64)]:
        for before in [plain.addresses(grads), plain.addresses(grads[1:]), None]:
            asked = params, False, kind, before
            assert alike(looks_in_cpp.gather(*asked), plain.gather(*asked))


def test_slices_that_lay_there_before_are_ordinary(looks_in_cpp):
    params = [PARAMS["view"](), PARAMS["another view"]()]
    before = plain.addresses([param.grad for param in params])
    kind = torch.device("cpu"), torch.float32
    assert looks_in_cpp.gather(params, False, None, None) is None
    assert looks_in_cpp.gather(params, False, kind, before) is not None


def test_gradients_that_only_autograd_has_seen_are_gathered_alike(looks_in_cpp):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(100)]
    torch.stack([param.sum() for param in params[1:]]).sum().backward()
    told = looks_in_cpp.gather(params, False, None, None)
    assert len(told[1]) == 99
    assert alike(told, plain.gather(params, False, None, None))


def test_the_very_list_is_returned_where_all_have_a_gradient(looks_in_cpp):
    params = [PARAMS["dense"](), PARAMS["dense"]()]
    assert looks_in_cpp.gather(params, False, None, None)[0] is params


def untracked():
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize("make", [untracked, lambda: torch._neg_view(torch.ones(3))])
def test_gradients_that_are_not_what_lies_there_are_not_ordinary(looks_in_cpp, make):
    params = [holding(torch.ones(3)), holding(None)]
    params[1].grad = make()
    asked = params, False, None, None
    assert plain.gather(*asked) is looks_in_cpp.gather(*asked) is None


def test_a_tensor_that_is_no_leaf_is_left_to_python_which_warns(looks_in_cpp):
    params = [holding(torch.ones(3)), holding(torch.ones(3)) * 2.0]
    with pytest.warns(UserWarning, match="not a leaf"):
        plain.gather(params, False, None, None)
    assert looks_in_cpp.gather(params, False, None, None) is None


@pytest.mark.parametrize("wrong", [[None], [1, 2], ["text"], [[torch.ones(3)]]])
def test_what_is_no_tensor_is_not_ordinary(looks_in_cpp, wrong):
    assert looks_in_cpp.gather(wrong, False, None, None) is None


# --- untouched ------------------------------------------------------------------------


def exchange(param):
    param.grad = torch.ones_like(param.grad)


def drop(param):
    param.grad = None


def write(param):
    param.grad.mul_(2.0)


def swap_memory(param):
    param.grad.data = torch.ones_like(param.grad)


def nothing(param):
    pass


DEEDS = [exchange, drop, write, swap_memory, nothing]


@given(
    mix=st.lists(st.sampled_from(ORDINARY), min_size=1, max_size=150),
    deed=st.sampled_from(DEEDS),
    place=st.integers(0, 149),
)
@TWINS
def test_what_was_done_to_a_gradient_is_seen_alike(looks_in_cpp, mix, deed, place):
    params = [PARAMS[name]() for name in mix]
    with_grad = [param for param in params if param.grad is not None]
    tensors = [param.grad for param in with_grad]
    lay = plain.addresses(tensors), plain.versions(tensors)
    told = looks_in_cpp.gather(params, True, None, None)
    if with_grad:
        deed(with_grad[place % len(with_grad)])
    expected = plain.untouched(params, tensors, *lay)
    assert expected is (deed is nothing or not with_grad)
    assert looks_in_cpp.untouched(params, tensors, *lay) is expected
    if told is not None:
        held = told[1]
        assert looks_in_cpp.untouched(params, held, *lay) is expected
        assert plain.untouched(params, held, *lay) is expected
        assert looks_in_cpp.versions(held) == plain.versions(tensors)
        assert looks_in_cpp.addresses(held) == plain.addresses(tensors)


@pytest.mark.parametrize("deed", [exchange, drop, write, swap_memory])
@pytest.mark.parametrize("with_none", [False, True])
def test_a_touched_gradient_is_seen(looks_in_cpp, deed, with_none):
    params = [PARAMS["dense"]() for _ in range(70)]
    params += [PARAMS["none"]()] if with_none else []
    tensors = [param.grad for param in params if param.grad is not None]
    lay = plain.addresses(tensors), plain.versions(tensors)
    assert looks_in_cpp.untouched(params, tensors, *lay) is True
    deed(params[66])
    assert looks_in_cpp.untouched(params, tensors, *lay) is False


def test_a_gradient_that_came_is_seen(looks_in_cpp):
    params = [PARAMS["none"](), PARAMS["dense"](), PARAMS["none"]()]
    tensors = [params[1].grad]
    params[2].grad = torch.ones(3)
    lay = plain.addresses(tensors), plain.versions(tensors)
    assert looks_in_cpp.untouched(params, tensors, *lay) is False


@pytest.mark.parametrize("name", ["subclass", "of a subclass"])
def test_a_subclass_is_left_to_python(looks_in_cpp, name):
    params = [PARAMS[name]()]
    tensors = [param.grad for param in params if param.grad is not None]
    zeros = array("q", [0] * len(tensors))
    assert looks_in_cpp.untouched(params, tensors, zeros, zeros) is None


# --- numbers of each ------------------------------------------------------------------


@given(mix=st.lists(st.sampled_from([*ORDINARY, "view", "across", "empty", "meta"])))
@TWINS
def test_addresses_and_versions_are_alike(looks_in_cpp, mix):
    tensors = [PARAMS[name]() for name in mix]
    tensors += [param.grad for param in tensors if param.grad is not None]
    assert looks_in_cpp.addresses(tensors) == plain.addresses(tensors)
    assert looks_in_cpp.versions(tensors) == plain.versions(tensors)
    assert looks_in_cpp.storages(tensors) == plain.storages(tensors)


def lying(tensors):
    """Return what `as_before` is asked for these tensors."""
    return [tensors], [plain.addresses(tensors)], plain.numbers(map(len, tensors))


def elsewhere(tensor):
    tensor.data = torch.zeros_like(tensor)


def shorter(tensor):
    tensor.data = tensor.data[:-1]


def with_gaps(tensor):
    tensor.data = tensor.data[::2]


def longer(tensor):
    tensor.data = tensor.data.as_strided((len(tensor) + 1,), (1,))


CHANGES = [elsewhere, shorter, with_gaps, longer, nothing]


@given(
    sizes=st.lists(st.integers(2, 5), max_size=150),
    change=st.sampled_from(CHANGES),
    place=st.integers(0, 149),
)
@TWINS
def test_what_lies_otherwise_is_seen_alike(looks_in_cpp, sizes, change, place):
    tensors = [torch.ones(size + 1)[:size] for size in sizes]
    asked = lying(tensors)
    assert looks_in_cpp.as_before(*asked) is True
    assert looks_in_cpp.as_before([tensors], [asked[1][0][1:]], asked[2]) is not bool(
        sizes
    )
    if sizes:
        change(tensors[place % len(sizes)])
    assert looks_in_cpp.as_before(*asked) is plain.as_before(*asked)
    assert plain.as_before(*asked) is (change is nothing or not sizes)


def test_one_tensor_among_many_that_lies_elsewhere_is_seen(looks_in_cpp):
    tensors, others = [torch.ones(3) for _ in range(70)], [torch.ones(3)] * 70
    old = tensors[66].data
    rows, numels = list(map(plain.addresses, (others, tensors))), array("q", [3] * 70)
    assert looks_in_cpp.as_before([others, tensors], rows, numels) is True
    assert looks_in_cpp.as_before([others, tensors], rows[1:], numels) is False
    tensors[66].data = torch.ones(3)
    assert looks_in_cpp.as_before([others, tensors], rows, numels) is False
    tensors[66].data = old
    assert looks_in_cpp.as_before([others, tensors], rows, numels) is True


@given(
    mix=st.lists(st.sampled_from([*ORDINARY, "view", "across", "empty", "meta"])),
    others=st.lists(st.sampled_from(ORDINARY), max_size=3),
)
@TWINS
def test_lists_are_surveyed_alike(looks_in_cpp, mix, others):
    lists = [[PARAMS[name]() for name in names] for names in (mix, others)]
    lists.append([param.grad for param in lists[0] if param.grad is not None])
    told = looks_in_cpp.survey(lists)
    assert plain.Survey._make(told) == plain.survey(lists)


@given(sizes=st.lists(st.integers(0, 3), max_size=200), place=st.integers(0, 199))
@TWINS
def test_other_sizes_are_seen_alike(looks_in_cpp, sizes, place):
    lists = [[torch.ones(size) for size in sizes] for _ in range(3)]
    assert looks_in_cpp.as_large(lists) is plain.as_large(lists) is True
    if sizes:
        lists[2][place % len(sizes)] = torch.ones(7)
        assert looks_in_cpp.as_large(lists) is plain.as_large(lists) is False


def test_gathered_gradients_are_compared_in_size(looks_in_cpp):
    params = born_in_autograd()
    held = looks_in_cpp.gather(params, False, None, None)[1]
    assert looks_in_cpp.as_large([params, held]) is True
    assert looks_in_cpp.as_large([params, held[1:]]) is False
    params[200].data = torch.ones(4)
    assert looks_in_cpp.as_large([params, held]) is False
    assert looks_in_cpp.as_large([params, (*held,)]) is None


@pytest.mark.parametrize("place", [0, 1])
def test_tensors_of_other_sizes_are_not_walked_together(looks_in_cpp, place):
    lists = [[torch.ones(3), torch.ones(3)] for _ in range(3)]
    counts = [torch.ones(()), torch.ones(())]
    for look in (looks_in_cpp.survey, plain.survey):
        assert look([*lists, counts])[2] is True
    lists[1][place] = torch.ones(4)
    for look in (looks_in_cpp.survey, plain.survey):
        assert look([*lists, counts])[2] is False


def test_a_negated_tensor_is_not_walked(looks_in_cpp):
    lists = [[torch.ones(3)], [torch._neg_view(torch.ones(3))], [torch.ones(())]]
    assert looks_in_cpp.survey(lists) is plain.survey(lists) is None


def test_a_subclass_among_surveyed_tensors_is_no_ordinary_one(looks_in_cpp):
    lists = [[torch.ones(2)], [torch.ones(2), torch.ones(2).as_subclass(Special)]]
    assert looks_in_cpp.survey(lists) is None
    assert plain.survey(lists) is None


@pytest.mark.parametrize("look", ["addresses", "versions", "note_writes"])
def test_lists_with_a_subclass_are_left_to_python(looks_in_cpp, look):
    tensors = [torch.ones(3), torch.ones(3).as_subclass(Special)]
    assert getattr(looks_in_cpp, look)(tensors) is None
    assert [tensor._version for tensor in tensors] == [0, 0]
    assert looks_in_cpp.as_before(*lying(tensors)) is None


def test_an_address_that_cannot_be_had_raises_as_in_python(looks_in_cpp):
    tensors = [sparse([1], [1.0], 3)]
    with pytest.raises(RuntimeError) as by_python:
        plain.addresses(tensors)
    with pytest.raises(RuntimeError) as told:
        looks_in_cpp.addresses(tensors)
    assert looks_in_cpp.as_before([tensors], [array("q", [0])], array("q", [3])) is None
    assert type(told.value) is type(by_python.value)


def test_memory_that_is_copied_on_write_is_copied(looks_in_cpp):
    source = torch.ones(3)
    lazy = torch._lazy_clone(source)
    assert list(looks_in_cpp.addresses([lazy])) != [source.data_ptr()]


def test_memory_that_somebody_will_copy_on_write_is_left_to_python(looks_in_cpp):
    asked = lying(tensors := [torch.ones(3) for _ in range(70)])
    lazy = torch._lazy_clone(tensors[66])
    assert looks_in_cpp.as_before(*asked) is None
    # Where it is now, it may be written to.
    assert plain.as_before(*asked) is False
    assert lazy.tolist() == [1.0, 1.0, 1.0]


def test_writes_are_noted_alike(looks_in_cpp):
    with torch.inference_mode():
        untracked = torch.ones(3)
    ours, theirs = [torch.ones(3), BUFFER[:2]], [torch.ones(3), torch.ones(2)]
    before = plain.versions(ours)
    looks_in_cpp.note_writes([*ours, untracked])
    plain.note_writes([*theirs, untracked])
    steps = [b - a for a, b in zip(before, plain.versions(ours), strict=True)]
    assert steps == list(plain.versions(theirs)) == [1, 1]


@pytest.mark.parametrize(
    "vector",
    [
        torch.arange(5.0),
        torch.arange(9.0)[1::3],
        torch.arange(4, dtype=torch.int64),
        torch.ones(0),
        torch.ones(3, device="meta"),
    ],
    ids=["whole", "with gaps", "i64", "empty", "meta"],
)
def test_scalars_are_those_of_python(looks_in_cpp, vector):
    told, by_python = looks_in_cpp.scalars(vector), plain.scalars(vector)
    assert len(told) == len(by_python)
    for one, other in zip(told, by_python, strict=True):
        assert (one.shape, one.dtype, one.device) == ((), other.dtype, other.device)
        assert one.data_ptr() == other.data_ptr()
        assert one.is_contiguous()
        assert not one.requires_grad
        assert one.untyped_storage()._cdata == vector.untyped_storage()._cdata
        if one.device.type == "cpu":
            assert one == other


def test_a_scalar_shares_its_memory_and_outlives_the_vector(looks_in_cpp):
    vector = torch.zeros(2)
    first, second = looks_in_cpp.scalars(vector)
    vector[1] = 3.0
    first.add_(1.0)
    assert vector.tolist() == [1.0, 3.0]
    del vector
    assert (first.item(), second.item()) == (1.0, 3.0)


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 2), torch.ones(()), torch.ones(2).as_subclass(Special), None],
    ids=["matrix", "scalar", "subclass", "nothing"],
)
def test_scalars_of_something_else_are_left_to_python(looks_in_cpp, other):
    assert looks_in_cpp.scalars(other) is None


# --- identity -------------------------------------------------------------------------


OBJECTS = [torch.ones(2) for _ in range(3)]
SOME = st.lists(st.sampled_from(OBJECTS), max_size=3)


@given(some=SOME, others=SOME)
@TWINS
def test_lists_are_compared_alike(looks_in_cpp, some, others):
    assert looks_in_cpp.same(some, others) is plain.same(some, others)


ENTRIES = st.dictionaries(st.sampled_from("abc"), st.sampled_from(OBJECTS), max_size=2)
STATES = st.lists(ENTRIES, max_size=3)


@given(entries=STATES, others=STATES, kind=st.sampled_from([dict, defaultdict]))
@TWINS
def test_states_are_compared_alike(looks_in_cpp, entries, others, kind):
    owners = [torch.ones(1) for _ in entries]
    state = kind()
    state.update(zip(owners, entries, strict=True))
    for keys in (owners, owners[::-1], owners[1:]):
        for held in (entries, others):
            asked = state, keys, [value for one in held for value in one.values()]
            assert looks_in_cpp.same_state(*asked) is plain.same_state(*asked)


@pytest.mark.parametrize("state", [OrderedDict(), {1: ()}, None])
def test_a_state_of_another_kind_is_left_to_python(looks_in_cpp, state):
    assert looks_in_cpp.same_state(state, [1], []) is None


# --- references -----------------------------------------------------------------------


def test_no_look_keeps_or_drops_a_reference(looks_in_cpp):
    params = [PARAMS[name]() for name in ("dense", "none", "another")]
    grads = [params[0].grad, params[2].grad]
    views = [PARAMS["view"](), PARAMS["view"]()]
    state, values = {params[0]: {"a": grads[0]}}, [grads[0]]
    marks = plain.versions(grads)
    kind = torch.device("cpu"), torch.float32
    watched = [*params, *grads, *views, params, grads, state, values, marks, kind]
    watched += [None, True, array, views[0].grad]

    def look():
        looks_in_cpp.gather(params, False, kind, marks)
        looks_in_cpp.gather(views, False, None, None)
        looks_in_cpp.untouched(params, grads, marks, marks)
        looks_in_cpp.addresses(params)
        looks_in_cpp.storages(params)
        looks_in_cpp.as_large([grads, grads])
        looks_in_cpp.survey([params, grads])
        looks_in_cpp.as_before([params], [marks], marks)
        looks_in_cpp.as_before(*lying(grads))
        looks_in_cpp.versions([*params, "no tensor"])
        looks_in_cpp.scalars(grads[0])
        looks_in_cpp.same(params, grads)
        looks_in_cpp.same_state(state, [params[0]], values)
        looks_in_cpp.note_writes(grads)

    look()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        look()
    after = [sys.getrefcount(thing) for thing in watched]
    # None, True and array belong to everybody: a leak would show a thousand times.
    assert max(abs(b - a) for a, b in zip(before, after, strict=True)) < 100
    assert before[:-4] == after[:-4]


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(None, None, -1)])
def test_what_is_gathered_is_held_and_given_back(looks_in_cpp, part):
    params = [PARAMS["none"](), PARAMS["dense"](), PARAMS["another"]()]
    grad, other = (weakref.ref(param.grad) for param in params[1:])
    found = looks_in_cpp.gather(params, False, None, None)[1]
    for param in params:
        param.grad = None
    assert found[0] is grad()
    assert found[1] is other()
    found = found[part]
    assert other() is not None
    del found
    assert grad() is other() is None


def born_in_autograd(count=300):
    """Return parameters of whose gradients nobody in Python knows."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    torch.stack([param.sum() for param in params]).sum().backward()
    return params


def objects_of_tensors():
    return sum(type(thing) is Tensor for thing in gc.get_objects())


def test_no_object_is_made_of_a_gradient_that_nobody_asks_for(looks_in_cpp):
    params = born_in_autograd()
    gc.collect()
    before = objects_of_tensors()
    found = looks_in_cpp.gather(params, False, None, None)
    assert looks_in_cpp.untouched(params, found[1], *found[2:4]) is True
    assert looks_in_cpp.versions(found[1]) == found[3]
    assert objects_of_tensors() == before
    assert plain.same(found[1], [param.grad for param in params])


def test_gathered_gradients_are_a_sequence(looks_in_cpp):
    params = born_in_autograd(5)
    held = looks_in_cpp.gather(params, False, None, None)[1]
    grads = [param.grad for param in params]
    assert (len(held), bool(held), list(held)) == (5, True, grads)
    for part in (slice(1, 3), slice(None), slice(4, 0, -2), slice(9, 12)):
        assert plain.same(held[part], grads[part])
    assert held[-1] is grads[-1]
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            held[wrong]
    with pytest.raises(TypeError):
        held["first"]
    with pytest.raises(TypeError):
        type(held)()


# --- whoever answers for itself -------------------------------------------------------


def test_no_code_of_others_runs_in_a_look_at_gradients(looks_in_cpp):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(300)]
    for param in params:
        param.grad = torch.ones(3)
    for place in (0, 200):
        params[place].grad = Answering(torch.ones(3))
        Answering.asked.clear()
        assert looks_in_cpp.gather(params, False, None, None) is None
        assert Answering.asked == []
        params[place].grad = torch.ones(3)


def test_a_tensor_of_a_transformation_is_left_to_python(looks_in_cpp):
    tensors = [torch.ones(3) for _ in range(300)]
    tensors[200] = torch._to_functional_tensor(Answering(torch.ones(3)))
    assert type(tensors[200]) is Tensor
    Answering.asked.clear()
    zeros = array("q", [0] * 300)
    begins = plain.addresses(tensors[:200]) + zeros[200:]
    assert looks_in_cpp.as_before([tensors], [begins], array("q", [3] * 300)) is None
    assert looks_in_cpp.survey([tensors]) is None
    assert Answering.asked == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_ordinary_is_never_left_to_python(looks_in_cpp, device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    params = [
        torch.nn.Parameter(torch.ones(4, device=device, dtype=dtype))
        for _ in range(300)
    ]
    torch.stack([param.sum() for param in params]).sum().backward()
    grads = [param.grad for param in params]
    told = looks_in_cpp.gather(params, True, None, None)
    assert alike(told, plain.gather(params, True, None, None))
    assert looks_in_cpp.as_before(*lying(params)) is True
    lay = plain.addresses(grads), plain.versions(grads)
    assert looks_in_cpp.untouched(params, grads, *lay) is True
    assert looks_in_cpp.survey([params, grads]) is not None


# --- the crew -------------------------------------------------------------------------


def test_looks_that_follow_each_other_are_all_right(looks_in_cpp):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(1000)]
    for param in params:
        param.grad = torch.ones(2)
    tensors, marks = [p.grad for p in params], plain.versions([p.grad for p in params])
    begins, asked = plain.addresses(tensors), lying(params)
    for turn in range(2000):
        place = turn % 1000
        found = looks_in_cpp.gather(params, False, None, None)
        assert plain.same(found[1], tensors)
        assert looks_in_cpp.untouched(params, tensors, begins, marks)
        tensors[place].mul_(1.0)
        assert not looks_in_cpp.untouched(params, tensors, begins, marks)
        marks[place] += 1
        looks_in_cpp.note_writes(params)
        assert looks_in_cpp.as_before(*asked)
    assert {param._version for param in params} == {2000}


def test_a_forked_child_looks_by_itself(looks_in_cpp):
    asked = lying([torch.ones(2) for _ in range(300)])
    assert looks_in_cpp.as_before(*asked)
    child = os.fork()
    if child == 0:
        # No more of Python than this: the other threads of the test are gone here.
        signal.alarm(30)
        os._exit(0 if looks_in_cpp.as_before(*asked) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert looks_in_cpp.as_before(*asked)


# --- the choice -----------------------------------------------------------------------


def test_python_answers_where_cpp_cannot_tell(looks_in_cpp, monkeypatch):
    monkeypatch.setattr(building, "native", looks_in_cpp)
    tensors = [torch.ones(3).as_subclass(Special)]
    assert list(looks.addresses(tensors)) == [tensors[0].data_ptr()]
    looks.note_writes(tensors)
    assert list(looks.versions(tensors)) == [1]


def test_cpp_answers_once_it_is_there(monkeypatch):
    class Native:
        def addresses(self, tensors):
            return "asked"

    monkeypatch.setattr(building, "native", Native())
    assert looks.addresses([]) == "asked"


def test_tracing_never_asks_cpp(monkeypatch):
    monkeypatch.setattr(building, "native", object())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert looks.same([], [])
    assert looks.gather([], False) is None
