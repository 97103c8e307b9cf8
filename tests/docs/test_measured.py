"""The tables of measured times, rendered from made-up results."""

import json

import pytest

from benchmarks import bench_train, bench_walk, contestants
from docs import measured


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Write a record into an empty folder of results."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)

    def add(name, *rows):
        record = {"device": "NVIDIA H200", "rows": list(rows)}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    return add


def step_row(impl, p50, **more):
    return {
        "impl": impl,
        "dtype": "f32",
        "elements": 124_000_000,
        "tensors": 148,
        "clock": "device",
        "p50": p50,
        "floor_ms": 0.96,
        **more,
    }


def train_row(impl, p50=50.0, **more):
    return {"impl": impl, "batch": "16x1024", "elements": 124e6, "p50": p50, **more}


def last_row(table):
    return [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]


def test_a_step_is_shown_with_floor_and_ratios(results):
    results(
        "step_h200",
        step_row(measured.BARE, 1.0),
        step_row(measured.TORCH, 3.0),
        step_row(measured.FUSED, 1.5, ratio_to_torch=0.5, ratio_to_floor=1.56),
        step_row(measured.OWN, 1.2, ratio_to_torch=0.4, ratio_to_floor=1.25),
    )
    assert last_row(measured.step_table()) == [
        "124 M parameters in 148 tensors, NVIDIA H200, device time",
        "0.96 ms",
        "1 ms",
        "3 ms",
        "1.5 ms, 0.50 × torch",
        "1.2 ms, 0.40 × torch, 1.25 × floor",
    ]


def test_halves_have_a_row_of_their_own(results):
    results(
        "step_h200",
        step_row(measured.TORCH, 3.0),
        step_row(measured.OWN, 1.1, dtype="f16", ratio_to_floor=1.1),
    )
    table = measured.step_table().splitlines()
    assert len(table) == 4
    assert "in 148 tensors of f16, NVIDIA H200" in table[-1]
    assert last_row(table[-1])[-1] == "1.1 ms, 1.10 × floor"


def test_a_cpu_has_no_floor(results):
    wall = {"clock": "wall", "ratio_to_torch": 0.9, "ratio_to_floor": 0.5}
    results("step_cpu", step_row(measured.OWN, 130.0, **wall))
    _, floor, *_, own = last_row(measured.step_table())
    assert (floor, own) == ("–", "130 ms, 0.90 × torch")


def test_the_short_table_has_device_times_of_f32_only(results):
    results("step_cpu", step_row(measured.TORCH, 145.0, clock="wall"))
    results(
        "step_h200",
        step_row(measured.TORCH, 3.0),
        step_row(measured.OWN, 1.2, ratio_to_torch=0.4),
        step_row(measured.OWN, 1.1, dtype="f16"),
    )
    table = measured.step_short_table()
    assert len(table.splitlines()) == 3
    assert last_row(table) == [
        "124 M parameters in 148 tensors",
        "3 ms",
        "–",
        "1.2 ms, 0.40 × torch",
    ]


def test_a_step_by_itself_is_shown_for_gpus(results):
    wall = {"wall_p50": 4.0, "wall_ratio_to_torch": 0.5}
    results("step_cpu", step_row(measured.TORCH, 145.0, clock="wall", **wall))
    results(
        "step_h200",
        step_row(measured.TORCH, 3.0, wall_p50=8.0, wall_ratio_to_torch=1.0),
        step_row(measured.OWN, 1.2, **wall),
    )
    table = measured.wall_table()
    assert len(table.splitlines()) == 3
    assert last_row(table)[1:] == ["8 ms", "–", "4 ms, 0.50 × torch", "–"]


def test_torchs_loop_is_shown_under_either_scaler(results):
    results(
        "loop_h200",
        step_row(measured.TORCH, 1.5, wall_p50=3.0),
        step_row(
            "gradscale, torch's loop + fused",
            1.8,
            ratio_to_torch=1.2,
            wall_p50=3.3,
            wall_ratio_to_torch=1.1,
        ),
    )
    assert last_row(measured.loop_table())[1:] == [
        *("1.5 ms", "1.8 ms, 1.20 × torch", "3 ms", "3.3 ms, 1.10 × torch"),
    ]


def test_memory_is_a_share_of_the_parameters(results):
    results("step_cpu", step_row(measured.TORCH, 145.0))
    results("step_h200", step_row(measured.OWN, 1.2, memory_share=1.0066))
    table = measured.memory_table()
    assert len(table.splitlines()) == 3
    assert last_row(table)[1:] == ["–", "–", "100.66 %", "–"]


def test_a_time_of_seconds_is_written_out(results):
    results("step_cpu", step_row(measured.TORCH, 1512.4))
    assert last_row(measured.step_table())[3] == "1512 ms"


def test_every_file_of_results_has_its_rows(results):
    results("step_cpu", step_row(measured.TORCH, 145.0, clock="wall"))
    results("step_h200", step_row(measured.TORCH, 3.0))
    assert len(measured.step_table().splitlines()) == 4


def test_the_host_has_a_row_for_each_number_of_tensors(results):
    rows = [
        {"impl": measured.OWN, "tensors": n, "p50": n / 100, "ratio_to_torch": 0.25}
        for n in (10, 1000)
    ]
    results("host_h200", *rows)
    table = measured.host_table()
    assert len(table.splitlines()) == 4
    assert last_row(table) == [
        "1000 tensors, NVIDIA H200",
        "–",
        "–",
        "–",
        "10 ms, 0.25 × torch",
    ]


def test_a_training_step_is_shown_with_overheads_and_bounds(results):
    more = {"overhead_percent": 1.23, "overhead_bound_percent": 1.56}
    less = {"overhead_percent": -0.5, "overhead_bound_percent": 0.04}
    results(
        "train_h200",
        train_row("no scaler + fused"),
        train_row("torch.amp + fused", **more),
        train_row("gradscale + fused", **less),
        train_row(measured.OWN, **less),
    )
    assert last_row(measured.train_table()) == [
        "124 M parameters, batch 16x1024, fused AdamW, NVIDIA H200",
        "50 ms",
        "+1.2 % (+1.6 %)",
        "-0.5 % (+0.0 %)",
        "–",
        "-0.5 % (+0.0 %)",
    ]


def test_own_adamw_is_not_shown_beside_the_foreach_one(results):
    figures = {"overhead_percent": 1.0, "overhead_bound_percent": 2.0}
    base = train_row("no scaler + foreach")
    results("train_h200", base, train_row(measured.OWN, **figures))
    assert last_row(measured.train_table())[-1] == "–"


def test_other_settings_of_a_training_step_are_shown_for_gpus(results):
    row = train_row("gradscale, recorded + fused")
    row |= {"overhead_percent": 0.2, "overhead_bound_percent": 0.3}
    results("train_h200", row)
    assert last_row(measured.variants_table()) == [
        "batch 16x1024, NVIDIA H200",
        "–",
        "+0.2 % (+0.3 %)",
        "–",
    ]


def test_the_host_time_of_verdicts_is_shown_in_microseconds(results):
    inside = {"optimizer": "own", "inside_us": 15.9, "inside_mean_us": 34.5}
    silent = {"impl": "silent", "optimizer": "own"}
    results("record_h200", silent, {"impl": "verdicts", **inside})
    table = measured.record_table()
    assert len(table.splitlines()) == 3
    wanted = ["verdicts, gradscale's AdamW, NVIDIA H200", "16 µs", "34 µs"]
    assert last_row(table) == wanted


def test_the_calls_of_a_step_are_shown_by_method(results):
    counts = {f"{method}_calls": 0 for method in bench_walk.METHODS}
    results(
        "walk", {"impl": "plain", "files": 3, "calls": 9, **counts, "clip_calls": 9}
    )
    wanted = ["3", "9", "–", "–", "9", "–", "–", "–"]
    assert last_row(measured.walk_table())[1:] == wanted


def test_the_table_of_calls_uses_the_names_of_the_cases():
    assert measured.WALKS.keys() == bench_walk.CASES.keys() - {"torch.amp, foreach"}


def test_the_source_of_every_table_is_named(results, tmp_path):
    about = {"commit": "abc", "date": "2026-01-01", "versions": {"torch": "2.13"}}
    record = {"device": "NVIDIA H200", "rows": [], **about}
    (tmp_path / "step_h200.json").write_text(json.dumps(record))
    wanted = ["`step_h200.json`", "abc", "2026-01-01", "NVIDIA H200; torch 2.13"]
    assert last_row(measured.sources_table()) == wanted


RENDERED = ["step", "step-short", "wall", "memory", "host", "train", "train-variants"]
RENDERED += ["record", "walk", "sources"]


@pytest.mark.parametrize("name", RENDERED)
def test_a_table_without_results_is_marked_as_not_measured(results, name):
    assert measured.TABLES[name]() == "Not measured yet."


@pytest.mark.parametrize("name", RENDERED)
def test_a_table_is_put_where_a_page_asks_for_it(results, name):
    page = f"{measured.BEGIN.format(name=name)}\n{measured.END}\n"
    assert "Not measured yet." in measured.filled(page)


@pytest.mark.parametrize("name", ["TORCH", "BARE", "OWN", "FUSED"])
def test_the_tables_use_the_names_of_the_contestants(name):
    assert getattr(measured, name) == getattr(contestants, name)


def test_the_table_of_training_uses_the_names_of_the_contestants():
    heads = ("no scaler", "torch.amp", "gradscale", "gradscale, torch's loop")
    wanted = {f"{head} + {kind}" for head in heads for kind in ("fused", "foreach")}
    others = {f"gradscale, recorded + {kind}" for kind in ("fused", "own AdamW")}
    others |= {"gradscale, plain + fused", measured.OWN}
    assert bench_train.TRAIN.keys() == wanted | others


def qat_row(seed, run, accuracy, lost=None):
    more = {"run": f"quantised, trained in {run}", "loss_weight": 1.0, "skipped": 0}
    return {"seed": seed, "accuracy": accuracy, "lost_gradients": lost, **more}


def test_the_accuracy_of_quantised_nets_is_a_mean_over_seeds(results):
    wide = [qat_row(0, "fp32", 0.8), qat_row(1, "fp32", 1.0)]
    half = [qat_row(0, "fp16", 0.9, 0.0), qat_row(1, "fp16", 1.0, 0.125)]
    results("qat_cpu", *wide, *half)
    assert last_row(measured.qat_table()) == [
        "quantised, trained in fp16",
        "1",
        "0.9500 ± 0.0707",
        "0.0500 ± 0.0707",
        "12.5%",
    ]


def test_each_export_is_a_row(results):
    row = {
        "seed": 3,
        "difference": 5e-6,
        "largest_difference": 0.05,
        "images_at_a_border": 22,
        "same_class": 0.999,
        "overflows_change_nothing": True,
    }
    results("qat_cpu", qat_row(3, "fp32", 0.9), row)
    cells = last_row(measured.qat_export_table())
    for figure in ("5.0e-06", "5.0e-02", "22", "99.9%", "nothing"):
        assert figure in cells
