"""Cases of `test_resume`: the scaler itself in `torch.distributed.checkpoint`."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.torch import GradScaler
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.resume_runs import FOLDER, KINDS, Run

CASES = Cases()
POLICY = DynamicScale(growth_interval=3, min_scale=2.0**-8, tolerance=0.1)


def used():
    """Return a scaler with steps behind it, one of them skipped."""
    run = Run(KINDS["ddp-foreach"])
    run.scaler = GradScaler("cpu", policy=POLICY)
    for step in range(8):
        run.take(step)
    return run.scaler


def kept(name, value):
    """Keep a value under "scaler"; return where."""
    path = FOLDER / f"dcp-{name}"
    dcp.save({"scaler": value}, checkpoint_id=path)
    return path


def refused(path, scaler):
    """Load what cannot be; return the error, and the state before and after."""
    before = scaler.state_dict()
    try:
        dcp.load({"scaler": scaler}, checkpoint_id=path)
        error = None
    except BaseException as caught:
        # Torch's own error of several ranks is no Exception.
        error = caught
    said = f"{type(error).__name__}: {error}"
    return {"error": said, "before": before, "after": scaler.state_dict()}


@CASES.case("dcp-object")
def _(rank):
    scaler, fresh = used(), GradScaler("cpu")
    dcp.load({"scaler": fresh}, checkpoint_id=kept("object", scaler))
    return scaler.state_dict(), fresh.state_dict()


@CASES.case("dcp-state-dict")
def _(rank):
    scaler, fresh = used(), GradScaler("cpu")
    read = {"scaler": fresh.state_dict()}
    dcp.load(read, checkpoint_id=kept("state", scaler.state_dict()))
    fresh.load_state_dict(read["scaler"])
    return scaler.state_dict(), fresh.state_dict()


@CASES.case("dcp-async")
def _(rank):
    run = Run(KINDS["ddp-foreach"])
    run.take(0)
    before, path = run.scaler.state_dict(), FOLDER / "dcp-async"
    # Of its own: the run goes on while the ranks talk about the checkpoint.
    own = dist.new_group(backend="gloo")
    kept = {"scaler": run.scaler}
    pending = dcp.async_save(kept, checkpoint_id=path, process_group=own)
    for step in range(1, 6):
        run.take(step)
    pending.result()
    fresh = GradScaler("cpu")
    dcp.load({"scaler": fresh}, checkpoint_id=path)
    return before, fresh.state_dict()


@CASES.case("dcp-into-torch")
def _(rank):
    scaler, fresh = used(), torch.amp.GradScaler("cpu")
    dcp.load({"scaler": fresh}, checkpoint_id=kept("for-torch", scaler))
    five = {key: scaler.state_dict()[key] for key in fresh.state_dict()}
    return five, fresh.state_dict()


@CASES.case("dcp-from-torch")
def _(rank):
    five = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()
    read = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    dcp.load(read, checkpoint_id=kept("of-torch", five))
    fresh = GradScaler("cpu")
    fresh.load_state_dict(read["scaler"])
    return five, {key: fresh.state_dict()[key] for key in five}


@CASES.case("dcp-disabled")
def _(rank):
    fresh = GradScaler("cpu", enabled=False)
    dcp.load({"scaler": fresh}, checkpoint_id=kept("enabled", used()))
    return {}, fresh.state_dict()


@CASES.case("dcp-cut-short")
def _(rank):
    path = kept("cut", used())
    if rank == 0:
        (file,) = path.glob("__0_0*")
        file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    return refused(path, GradScaler("cpu"))


@CASES.case("dcp-bad-scale")
def _(rank):
    path = kept("zero", {**used().state_dict(), "scale": 0.0})
    return refused(path, GradScaler("cpu"))


@CASES.case("dcp-newer")
def _(rank):
    state = used().state_dict()
    newer = {**state, "gradscale": {**state["gradscale"], "format": 99}}
    return refused(kept("newer", newer), GradScaler("cpu"))


@CASES.case("dcp-foreign")
def _(rank):
    apex = {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 1990}}
    return refused(kept("apex", apex), GradScaler("cpu"))


@CASES.case("dcp-not-there")
def _(rank):
    return refused(FOLDER / "nowhere", GradScaler("cpu"))


@CASES.case("dcp-into-static")
def _(rank):
    scaler = GradScaler("cpu", policy=StaticScale(scale=8.0))
    return refused(kept("for-static", used()), scaler)


@CASES.case("dcp-into-none")
def _(rank):
    return refused(kept("for-none", used()), GradScaler("cpu", policy=NoScale()))
