"""The inventory of PyTorch's tests."""

from pathlib import Path

import pytest

from parity.inventory import INVENTORY, find

DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


def test_an_instance_belongs_to_the_longest_name_that_fits():
    name = "test_grad_scaling_clipping_separate_unscale_cpu"
    entry = find("somewhere/test/test_torch.py", name)
    assert entry.test == "test_grad_scaling_clipping_separate_unscale"


def test_a_name_belongs_to_its_own_file():
    assert find("test/test_nn.py", INVENTORY[0].test) is None


def test_the_inventory_expects_42_instances_on_a_cpu():
    assert sum(entry.instances for entry in INVENTORY if entry.needs.cpu) == 42


def test_no_name_stands_twice_in_the_inventory():
    assert len({(entry.file, entry.test) for entry in INVENTORY}) == len(INVENTORY)


@pytest.mark.parametrize("entry", INVENTORY, ids=lambda entry: entry.test)
def test_every_name_is_in_the_documentation(entry):
    assert f"`{entry.test}`" in DOCS.read_text(encoding="utf-8")
