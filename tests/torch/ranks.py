"""Cases of `test_distributed`: two ranks whose scaler is given their group."""

import pickle

import torch
import torch.distributed as dist

from gradscale import ConfigError, ScaleCollapsed
from gradscale.torch import GradScaler
from tests.torch.parallel.launch import Cases
from tests.torch.training import INF, NAN, Custom, CustomFused, parameter, planted

SGD = torch.optim.SGD
MAKES = {
    "loop": lambda params: SGD(params, lr=1.0, foreach=False),
    "foreach": lambda params: SGD(params, lr=1.0, foreach=True),
    "fused": lambda params: SGD(params, lr=1.0, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    "custom": lambda params: Custom(params),
    "custom-fused": lambda params: CustomFused(params),
}
CASES = Cases()


def case(name):
    """Enter a function of (rank, group) under a name."""

    def enter(function):
        CASES.case(name)(lambda rank: function(rank, dist.group.WORLD))
        return function

    return enter


def _facts(scaler, param):
    last = scaler.last
    return {
        "applied": last.applied,
        "verdict": str(last.verdict),
        "scale": scaler.get_scale(),
        "amax": last.amax,
        "weights": param.tolist(),
    }


def _step(
    mine,
    group,
    make="loop",
    *,
    unscale=False,
    clip=None,
    loss=0.0,
    size=2,
    **how,
):
    """Run one iteration with this rank's gradient, None for no gradient at all."""
    how = {"init_scale": 8.0} | how
    scaler = GradScaler("cpu", process_group=group, **how)
    param = parameter(size)
    optimizer = MAKES[make]([param])
    scaler.scale(torch.full((), loss))
    if mine is not None:
        scaler.scale(planted(param, mine)).backward()
    if clip == "early":
        scaler.clip_grad_norm_(optimizer, 1.0)
    if unscale:
        scaler.unscale_(optimizer)
    if clip == "optimizer":
        scaler.clip_grad_norm_(optimizer, 1.0)
    if clip == "parameters":
        scaler.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return _facts(scaler, param)


def _enter_steps():
    for make in MAKES:
        for unscale in (False, True):
            for word, bad in (("inf", INF), ("nan", NAN)):

                @case(f"{word}-on-rank-1-{make}-{'unscaled' if unscale else 'ready'}")
                def _(rank, group, make=make, unscale=unscale, bad=bad):
                    return _step(bad if rank else 1.0, group, make, unscale=unscale)

        @case(f"finite-{make}")
        def _(rank, group, make=make):
            return _step(1.0 + rank, group, make)

        @case(f"no-gradients-on-rank-0-{make}")
        def _(rank, group, make=make):
            return _step(1.0 if rank else None, group, make)

        @case(f"no-gradients-on-rank-0-inf-on-rank-1-{make}")
        def _(rank, group, make=make):
            return _step(INF if rank else None, group, make)

    for clip in ("early", "optimizer", "parameters"):
        for unscale in (False, True):
            name = f"{clip}-{'unscaled' if unscale else 'ready'}"

            @case(f"norm-overflow-on-rank-1-{name}")
            def _(rank, group, clip=clip, unscale=unscale):
                mine = 3e38 if rank else 1.0
                how = {"unscale": unscale, "size": 4, "init_scale": 1.0}
                return _step(mine, group, clip=clip, **how)

            @case(f"clip-without-gradients-on-rank-0-{name}")
            def _(rank, group, clip=clip, unscale=unscale):
                mine = 0.25 if rank else None
                return _step(mine, group, clip=clip, unscale=unscale)


_enter_steps()


@case("bad-loss-on-rank-1-report")
def _(rank, group):
    return _step(NAN if rank else 1.0, group, loss=NAN if rank else 0.0)


@case("bad-loss-on-rank-1-raise")
def _(rank, group):
    loss = NAN if rank else 0.0
    return _step(NAN if rank else 1.0, group, loss=loss, guard="raise")


@case("no-group")
def _(rank, group):
    return _step(INF if rank else 1.0, None)


@case("collapse")
def _(rank, group):
    scaler = GradScaler("cpu", process_group=group, init_scale=2.0**-24)
    param = parameter(2, value=1.0)
    optimizer = SGD([param], lr=1.0)
    for count in range(9):
        optimizer.zero_grad()
        scaler.scale(planted(param, INF if rank else 1.0)).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleCollapsed as error:
            return {"count": count, "code": error.code, "weights": param.tolist()}
    return {"count": None}


@case("a-run")
def _(rank, group):
    scaler = GradScaler("cpu", process_group=group, init_scale=8.0, growth_interval=2)
    param = parameter(2)
    optimizer = SGD([param], lr=1.0, fused=True)
    scales = []
    for step in range(12):
        optimizer.zero_grad()
        bad = step in ((3, 7) if rank else (5,))
        scaler.scale(planted(param, INF if bad else 0.5)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = scaler.state_dict()
    return {"scales": scales, "weights": param.tolist(), "state": state}


@case("ddp-without-group")
def _(rank, group):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    scaler = GradScaler("cpu", init_scale=8.0, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    facts = []
    for value in (1.0, INF if rank else 1.0, 1.0):
        optimizer.zero_grad()
        loss = parallel(torch.full((2,), value)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        facts.append((scaler.last.applied, scaler.get_scale()))
    weights = [param.tolist() for param in model.parameters()]
    return {"facts": facts, "weights": weights, "finite": _finite(model)}


def _finite(model):
    return all(bool(torch.isfinite(param).all()) for param in model.parameters())


@case("pickling")
def _(rank, group):
    try:
        pickle.dumps(GradScaler("cpu", process_group=group))
    except ConfigError as error:
        return {"error": str(error)}
    return {"error": None}
