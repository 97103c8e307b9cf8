"""A rank that is set up otherwise is an error that names it, at once and on all."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.mistake_cases import CASES, CLIPS, SETTINGS, SPEAKING

# A hang lasts for the minute of the group's patience.
AT_ONCE = 55.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    return seen_by("tests.torch.parallel.mistake_cases", 2, folder)


def told(seen, name):
    """Return what both ranks were told, in the same call and soon."""
    for rank, one in enumerate(seen[name]):
        assert one is not None, f"nothing was said on rank {rank}"
    first, second = all_saw(seen, name)
    assert first["code"] == second["code"] == "GS111"
    assert first["text"] == second["text"]
    assert max(first["seconds"], second["seconds"]) < AT_ONCE
    assert "rank 0 " in first["text"]
    assert "rank 1 " in first["text"]
    return first, second


@pytest.mark.parametrize("way", SPEAKING)
@pytest.mark.parametrize("word", SETTINGS)
def test_another_setting_is_told_in_the_first_step_of_all_ranks(seen, word, way):
    first, second = told(seen, f"{word}-{way}")
    assert first["call"] == second["call"] == "step"
    assert first["count"] == second["count"] == 1
    assert (
        f"rank 1 with {'DynamicScale' if word != 'policy' else 'StaticScale'}"
        in (first["text"])
    )


@pytest.mark.parametrize("way", SPEAKING)
def test_a_later_checkpoint_on_one_rank_is_told_by_its_updates(seen, way):
    first, second = told(seen, f"later-checkpoint-{way}")
    assert "rank 0 at update 2; rank 1 at update 3." in first["text"]
    assert first["count"] == second["count"] == 1


@pytest.mark.parametrize("way", SPEAKING)
def test_a_state_loaded_on_one_rank_is_told_by_its_policy(seen, way):
    first, second = told(seen, f"loaded-on-one-rank-{way}")
    assert "rank 1 with DynamicScale(init_scale=4096.0" in first["text"]
    assert first["count"] == second["count"] == 1


@pytest.mark.parametrize("way", SPEAKING)
def test_another_scale_on_one_rank_is_told(seen, way):
    first, second = told(seen, f"other-scale-{way}")
    assert "rank 0 at scale 65536; rank 1 at scale 4096." in first["text"]
    assert first["count"] == second["count"] == 1


@pytest.mark.parametrize("way", SPEAKING)
def test_nothing_is_said_where_all_is_well(seen, way):
    assert all_saw(seen, f"all-is-well-{way}") == [[None, 4096.0]] * 2


@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
def test_nothing_is_said_of_two_optimizers_in_one_order(seen, way):
    assert seen[f"same-order-{way}"] == [None, None]


@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
def test_another_order_of_two_optimizers_is_told_by_their_shapes(seen, way):
    first, second = told(seen, f"other-order-{way}")
    assert "rank 0 in reading 1 of optimizer 0 (shapes (4, 8), (4,))" in first["text"]
    assert "rank 1 in reading 1 of optimizer 0 (shapes (6, 8), (6,))" in first["text"]
    assert first["count"] == second["count"] == 1


@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
def test_another_order_in_a_later_step_is_told_in_that_step(seen, way):
    first, second = told(seen, f"other-order-later-{way}")
    assert "rank 0 in reading 1 of optimizer 0" in first["text"]
    assert "rank 1 in reading 1 of optimizer 1" in first["text"]
    # Two steps and an update go well.
    assert first["count"] == second["count"] == 4


@pytest.mark.parametrize("way", ["fsdp2", "group"])
@pytest.mark.parametrize("word", CLIPS)
def test_a_clip_that_not_all_ranks_ask_for_is_told(seen, word, way):
    first, _ = told(seen, f"{word}-{way}")
    assert ("parameters" if "bare" in word else "clip") in first["text"]


@pytest.mark.parametrize("way", ["fsdp2", "group"])
def test_a_clip_after_unscale_is_told_in_the_next_reading(seen, way):
    first, second = told(seen, f"late-clip-on-one-rank-{way}")
    assert first["call"] == second["call"] == "unscale_"
    assert "after no clip of optimizer 0" in first["text"]
    assert "after 1 clip, the last by max_norm=1.0, norm_type=2.0," in first["text"]


def test_a_reading_that_only_one_rank_makes_is_told_by_its_updates(seen):
    first, second = told(seen, "further-reading")
    assert "rank 0 at update 1; rank 1 at update 0." in first["text"]
    assert (first["call"], second["call"]) == ("clip", "step")


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_refused_on_one_rank_are_told_to_the_others(seen, clip):
    first, second = all_saw(seen, f"half-gradients-on-one-rank-{clip}")
    assert (first["code"], second["code"]) == ("GS111", "GS105")
    assert first["call"] == second["call"] == ("clip" if clip else "step")
    assert "Rank 1 found gradients that cannot be used" in first["text"]
    assert max(first["seconds"], second["seconds"]) < AT_ONCE


def test_bare_parameters_refused_on_one_rank_are_told_to_the_others(seen):
    first, second = all_saw(seen, "overlapping-gradients-on-one-rank")
    assert (first["code"], second["code"]) == ("GS111", "GS106")
    assert "Rank 1 found gradients that cannot be used" in first["text"]


def test_the_catalogues_example_leads_to_its_code(seen):
    told(seen, "example")


def test_what_the_catalogue_has_instead_does_not_lead_to_the_code(seen):
    assert seen["instead"] == [None, None]


def test_no_case_broke_off(seen):
    said = [one for saw in seen.values() for one in saw if isinstance(one, dict)]
    assert [one["failed"] for one in said if "failed" in one] == []
    assert list(CASES)[-1] == "instead"
