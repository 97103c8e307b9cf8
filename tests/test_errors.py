"""The exceptions: their tree, their bases, their words."""

import copy
import pickle
import re
import traceback
import warnings

import pytest

import gradscale.errors
from gradscale.errors import (
    AmpError,
    ConfigError,
    GradientError,
    GradscaleError,
    GradscaleWarning,
    HopelessRun,
    OrderError,
    ScaleCollapsed,
    StateError,
)

ERRORS = (
    AmpError,
    ConfigError,
    GradientError,
    HopelessRun,
    OrderError,
    ScaleCollapsed,
    StateError,
)
each_error = pytest.mark.parametrize("kind", ERRORS)


def documented_tree():
    """Return {name: what it is} for the leaves of the tree in the docstring."""
    lines = gradscale.errors.__doc__.splitlines()
    leaves = [re.match(r"[├└]── (\w+)\s+(.*)", line) for line in lines]
    return {leaf[1]: leaf[2] for leaf in leaves if leaf}


def test_the_tree_in_the_docstring_is_the_real_one():
    real = {kind.__name__ for kind in GradscaleError.__subclasses__()}
    assert set(documented_tree()) == real == {kind.__name__ for kind in ERRORS}


@each_error
def test_the_tree_is_flat(kind):
    assert kind.__subclasses__() == []


@each_error
def test_a_docstring_begins_with_the_words_of_the_tree(kind):
    words = documented_tree()[kind.__name__]
    assert kind.__doc__.lower().startswith(words.lower())


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (AmpError, RuntimeError),
        (AmpError, NotImplementedError),
        (AmpError, AssertionError),
        (AmpError, ValueError),
        (ConfigError, ValueError),
        (ConfigError, AssertionError),
        (OrderError, RuntimeError),
        (OrderError, AssertionError),
        (GradientError, ValueError),
        (StateError, RuntimeError),
        (StateError, ValueError),
        (StateError, KeyError),
        (ScaleCollapsed, FloatingPointError),
        (GradscaleWarning, UserWarning),
    ],
)
def test_an_except_clause_for_a_built_in_catches(kind, built_in):
    with pytest.raises(built_in):
        raise kind("Something happened.", code="GS101")


@each_error
def test_an_error_ends_with_its_code(kind):
    error = kind("Something happened.", code="GS101")
    assert (str(error), error.code) == ("Something happened. [GS101]", "GS101")


@each_error
def test_the_words_of_the_replaced_scaler_come_first_and_ours_below_them(kind):
    error = kind("Ours.", code="GS102", replaces="Theirs.")
    assert str(error) == "Theirs.\nOurs. [GS102]"


def test_a_filter_for_the_words_of_the_replaced_scaler_still_matches():
    with pytest.raises(OrderError, match=r"^Theirs\."):
        raise OrderError("Ours.", code="GS102", replaces="Theirs.")


def test_a_traceback_shows_the_remedy_and_the_code():
    error = OrderError("Ours.", code="GS102", replaces="Theirs.")
    shown = "".join(traceback.format_exception_only(error))
    assert shown == "gradscale.errors.OrderError: Theirs.\nOurs. [GS102]\n"


@each_error
@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("replaces", [None, "Theirs."])
def test_an_error_survives_pickle_and_copy(kind, again, replaces):
    error = kind("Ours.", code="GS101", replaces=replaces)
    error.add_note("A note of the caller.")
    twin = again(error)
    twin = pickle.loads(twin) if isinstance(twin, bytes) else twin
    assert type(twin) is kind
    assert (str(twin), twin.code) == (str(error), error.code)
    assert twin.__notes__ == ["A note of the caller."]


@each_error
def test_an_error_needs_a_code(kind):
    with pytest.raises(TypeError, match="code"):
        kind("Something happened.")


def test_a_warning_ends_with_its_code():
    warning = GradscaleWarning("Something happened.", code="GS103")
    assert (str(warning), warning.code) == ("Something happened. [GS103]", "GS103")


def test_a_warning_survives_pickle():
    warning = GradscaleWarning("Something happened.", code="GS103")
    twin = pickle.loads(pickle.dumps(warning))
    assert (str(twin), twin.code) == (str(warning), warning.code)


def test_a_warning_can_be_filtered_by_its_class():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradscaleWarning)
        warnings.warn(GradscaleWarning("Something.", code="GS103"), stacklevel=1)
