"""Code of other projects that reaches into torch's scaler."""

from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from gradscale.torch import GradScaler

INF = float("inf")


def trained(scaler, *, dtype, fused, clip):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4).to(dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss = (weight.float() * torch.randn(4)).square().mean()
        scaler.scale(loss * (INF if step == 3 else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), weight.tolist()))
    return seen


def accepting_f16(make):
    """Return a scaler patched as kohya's sd-scripts patch theirs."""
    scaler = make("cpu", init_scale=256.0)
    original = scaler._unscale_grads_

    def replaced(optimizer, inv_scale, found_inf, allow_fp16):
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = replaced
    return scaler


def with_own_update(make):
    """Return a scaler whose subclass ends the step itself, as Composer's does."""

    class Own(make):
        def update(self, new_scale=None):
            scale, tracker = self._check_scale_growth_tracker("update")
            found = [
                flag
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            moves = self._growth_factor, self._backoff_factor, self._growth_interval
            torch._amp_update_scale_(scale, tracker, sum(found), *moves)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Own("cpu", init_scale=256.0, growth_interval=2)


HOSTS = {"kohya": (accepting_f16, torch.float16), "Composer": (with_own_update, None)}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_patches_the_scaler_trains_as_with_torchs(host, fused, clip):
    patched, dtype = HOSTS[host]
    how = {"dtype": dtype or torch.float32, "fused": fused, "clip": clip}
    ours = trained(patched(GradScaler), **how)
    assert ours == trained(patched(torch.amp.GradScaler), **how)
