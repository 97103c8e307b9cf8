"""Every benchmark runs on a CPU in its smallest size and writes rows of one shape."""

import json
from itertools import pairwise

import pytest

from benchmarks import (
    bench_host,
    bench_kernels,
    bench_meter,
    bench_precision,
    bench_record,
    bench_step,
    bench_train,
    timing,
)
from benchmarks.contestants import BARE, FUSED, OWN, STEP, TORCH, chosen


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A copy that takes no time, for the floor."""
    monkeypatch.setattr(bench_precision, "bytes_per_ms", lambda device, queue: 1e6)
    monkeypatch.setattr(bench_step, "bytes_per_ms", lambda device, queue: 1e6)


@pytest.fixture
def written(tmp_path, capsys):
    """Run a benchmark; return its record from the file that it wrote."""

    def run(script, *arguments):
        path = tmp_path / "out.json"
        script.main([*arguments, "--out", str(path), "--json"])
        record = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == record
        return record

    return run


SCRIPTS = [
    (bench_step, ["--set", "tiny", "--rounds", "1"]),
    (
        bench_train,
        ["--size", "tiny", "--batch", "2x8", "--rounds", "1", "--block", "1"],
    ),
    (bench_host, ["--count", "3", "--rounds", "1"]),
]
# These compare gradscale with itself.
OWN_SCRIPTS = [
    (bench_meter, ["--set", "tiny", "--rounds", "1"]),
    (bench_record, ["--set", "tiny", "--rounds", "2"]),
    (
        bench_precision,
        [
            "--size",
            "tiny",
            "--steps",
            "1",
            "--seeds",
            "1",
            "--rounds",
            "1",
            "--optimizer",
            "AdamW",
        ],
    ),
]


@pytest.mark.parametrize(("script", "arguments"), SCRIPTS + OWN_SCRIPTS)
def test_a_row_has_what_the_style_asks_for(script, arguments, written):
    record = written(script, *arguments)
    assert record["format"] == 1
    for row in record["rows"]:
        assert {"impl", "dtype", "elements", "p20", "p50", "p80"} <= row.keys()


@pytest.mark.parametrize(("script", "arguments"), SCRIPTS)
def test_a_table_is_printed(script, arguments, capsys):
    script.main(arguments)
    assert "gradscale + fused" in capsys.readouterr().out


@pytest.mark.parametrize("script", [bench_step, bench_train, bench_host])
def test_help_names_every_contestant(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert '"torch.amp + fused"' in shown
    assert " ".join(script.__doc__.split()) in shown


def test_all_contestants_of_the_step_are_measured(written):
    rows = written(bench_step, "--set", "tiny", "--rounds", "1")["rows"]
    assert [row["impl"] for row in rows] == list(chosen(STEP, None))


def test_a_step_is_compared_with_the_floor(written):
    row, *_ = written(bench_step, "--set", "tiny", "--rounds", "1")["rows"]
    assert row["floor_ms"] == 32 * row["elements"] / 1e6
    assert row["ratio_to_floor"] == pytest.approx(row["p50"] / row["floor_ms"])


# Torch's AdamW stands in for our own, which has masters.
@pytest.mark.filterwarnings("ignore:16 trainable parameters are float16")
def test_halves_have_a_lower_floor_and_only_own_adamw(written, monkeypatch):
    monkeypatch.setitem(STEP, OWN, STEP[FUSED])
    rows = written(bench_step, "--set", "tiny-halves", "--rounds", "1", "--only", OWN)
    (row,) = rows["rows"]
    assert row["dtype"] == "f16"
    assert row["floor_ms"] == 30 * row["elements"] / 1e6


def test_an_implementation_without_f16_support_is_left_out(written):
    record = written(bench_step, "--set", "tiny-halves", "--only", TORCH)
    assert record["rows"] == []


def test_a_step_is_compared_with_torch_and_with_bare_adamw(written):
    rows = written(bench_step, "--set", "tiny", "--rounds", "2")["rows"]
    by_name = {row["impl"]: row for row in rows}
    assert by_name[TORCH]["ratio_to_torch"] == 1.0
    assert by_name[BARE]["ratio_to_bare"] == 1.0
    fused = by_name[FUSED]
    assert fused["ratio_to_bare_and_8_bytes"] < fused["ratio_to_bare"]


def test_a_ratio_is_omitted_without_its_baseline(written):
    (row,) = written(bench_step, "--set", "tiny", "--only", FUSED)["rows"]
    assert "ratio_to_torch" not in row
    assert "ratio_to_bare" not in row


def test_what_was_measured_is_kept_when_a_later_part_fails(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    measure = bench_host.measure

    def failing(count, *rest):
        if count == 4:
            raise RuntimeError("out of memory")
        return measure(count, *rest)

    monkeypatch.setattr(bench_host, "measure", failing)
    with pytest.raises(RuntimeError):
        bench_host.main(
            ["--count", "3", "--count", "4", "--rounds", "1", "--out", str(path)]
        )
    assert {row["tensors"] for row in json.loads(path.read_text())["rows"]} == {3}


def test_gradients_of_the_host_benchmark_lie_elsewhere_in_every_step(monkeypatch):
    seen = []

    class Spy(timing.Stopwatch):
        def __init__(self, step, prepare, *rest, **how):
            def look():
                prepare()
                (optimizer,) = optimizers
                params = optimizer.param_groups[0]["params"]
                seen.append([param.grad.data_ptr() for param in params])

            super().__init__(step, look, *rest, **how)

    optimizers = []
    enter = bench_host.enter

    def noted(*given):
        entered = enter(*given)
        optimizers.append(entered.optimizer)
        return entered

    monkeypatch.setattr(bench_host, "enter", noted)
    monkeypatch.setattr(bench_host, "Stopwatch", Spy)
    bench_host.measure(2, "cpu", 1, [BARE], None)
    assert len(seen) > 3
    assert all(a != b for a, b in pairwise(seen))


def test_an_overhead_is_that_over_the_base_without_a_scaler(written):
    record = written(bench_train, *SCRIPTS[1][1])
    rows = {row["impl"]: row for row in record["rows"]}
    for kind in ("fused", "foreach"):
        ours, base = rows[f"gradscale + {kind}"], rows[f"no scaler + {kind}"]
        assert ours["ratio_to_base"] == pytest.approx(ours["p50"] / base["p50"])
        assert "ratio_to_base" not in base


def test_own_adamw_is_compared_with_torchs_fused_one():
    assert bench_train.base_of("own") == "no scaler + fused"


def test_an_overhead_has_a_median_and_a_bound():
    found = bench_train.overhead([2.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    assert found["overhead_percent"] == 0.0
    assert found["overhead_bound_percent"] == pytest.approx(50.0)


def test_a_skipped_step_is_recorded(written, monkeypatch):
    monkeypatch.setattr("benchmarks.contestants.INIT_SCALE", 2.0**126)
    rows = written(bench_train, *SCRIPTS[1][1], "--only", "gradscale + fused")["rows"]
    assert rows[0]["skipped"]


@pytest.mark.parametrize(("script", "arguments"), [SCRIPTS[0], SCRIPTS[2]])
def test_a_loss_is_scaled_before_every_step(script, arguments, monkeypatch, capsys):
    calls = []
    enter = script.enter

    def noted(*given):
        entered = enter(*given)

        def scale():
            calls.append("scale")
            entered.scale()

        def step():
            calls.append("step")
            entered.step()

        return entered._replace(scale=scale, step=step)

    monkeypatch.setattr(script, "enter", noted)
    script.main([*arguments, "--only", FUSED])
    assert calls == ["scale", "step"] * (timing.WARM_UP + 1)


class OneMillisecond:
    """A queue on which every step takes the device one ms, and the host two."""

    def timed(self, step, busy_ms):
        step()
        return timing.Queued(device=1.0, host=2.0, late=False)


def test_a_step_on_a_gpu_has_the_times_of_three_clocks():
    rows = bench_step.measure("tiny", "cpu", 2, None, OneMillisecond(), 1e6)
    for row in rows:
        assert row["clock"] == "device"
        assert (row["p50"], row["device_p50"], row["host_p50"]) == (1.0, 1.0, 2.0)
        assert row["ratio_to_torch"] == 1.0
        assert row["wall_p50"] > 0


def test_the_host_benchmark_on_a_gpu_has_the_time_of_the_host():
    rows = bench_host.measure(3, "cpu", 2, [TORCH, FUSED], OneMillisecond())
    assert [row["p50"] for row in rows] == [2.0, 2.0]
    assert [row["clock"] for row in rows] == ["host", "host"]


def test_the_kernel_sweep_exits_without_a_gpu():
    with pytest.raises(SystemExit, match="need a CUDA device"):
        bench_kernels.main(["--device", "cpu"])


def test_a_record_is_compared_with_a_scaler_that_leaves_its_rows_on_the_device(written):
    rows = written(bench_record, "--set", "tiny", "--rounds", "3")["rows"]
    assert [row["impl"] for row in rows] == [*bench_record.SCALERS] * 2
    assert {row["added_us"] for row in rows if row["impl"] == "silent"} == {0.0}
    clocked = [row["inside_us"] > 0.0 for row in rows if "inside_us" in row]
    assert clocked == [True] * 2 * len(bench_record.JUDGING)


def test_the_silent_scaler_judges_nothing_and_the_recorded_one_writes(monkeypatch):
    entered = {}
    enter = bench_record.enter

    def noted(who, *rest):
        made = enter(who, *rest)
        entered.setdefault(who.optimizer, []).append(made.scaler)
        return made

    monkeypatch.setattr(bench_record, "enter", noted)
    bench_record.main(["--set", "tiny", "--rounds", "2", "--json"])
    for scalers in entered.values():
        _, _, verdicts, recorded, *_ = scalers
        updates = [scaler._monitor._copies.updates for scaler in scalers]
        assert updates[0] == 0 < min(updates[1:])
        for scaler in (verdicts, recorded):
            scaler.close()
        judged = [len(scaler._monitor._run.records) for scaler in scalers[:4]]
        assert judged[:2] == [0, 0]
        assert min(judged[2:]) > 0
        assert recorded._monitor._run.recorder.path.exists()
        assert not verdicts._monitor.recorded
