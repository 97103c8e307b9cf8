"""States that other scalers saved, and how the rule goes on from them."""

import copy
import json
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradscale
from gradscale import DynamicScale, Observed, StateError
from gradscale.core.checkpoint import unpack
from gradscale.core.foreign_rules import recognise
from gradscale.core.state import PYTHON, FixedState, ScaleState

SAMPLES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "golden" / "imported").glob("*.json"))
}


def revived(value):
    """Return a saved value with the tensors, arrays and objects that it had."""
    if isinstance(value, list):
        return [revived(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    if "attributes" in value:
        return SimpleNamespace(**revived(value["attributes"]))
    return {key: revived(each) for key, each in value.items()}


def unrolled(runs):
    return list(chain.from_iterable(repeat(value, times) for value, times in runs))


def saved_in(name):
    return revived(SAMPLES[name]["saved"])


def imported(name, **more):
    sample = SAMPLES[name]
    source = sample["source"] if name == "apex_contrib" else None
    options = {"source": source, **sample["settings"], **more}
    return gradscale.import_state(saved_in(name), **options)


def following(state, flags):
    """Return the scale after each step of the rule."""
    saved = unpack(state, DynamicScale())
    now = (
        ScaleState(saved.scale, saved.finite_steps, saved.debt)
        if isinstance(saved.policy, DynamicScale)
        else FixedState(saved.scale)
    )
    scales = []
    for finite in flags:
        seen = Observed(finite, 1.0, True)
        now = saved.policy.next_state(now, seen, PYTHON.where)
        scales.append(now.scale)
    return scales


def refusal(saved, **options):
    """Return the error that a saved value is refused with."""
    with pytest.raises(StateError) as error:
        gradscale.import_state(saved, **options)
    return error.value


def telling(name):
    """Return the fields of the scaler in a sample."""
    return copy.deepcopy(recognise(saved_in(name))[1])
