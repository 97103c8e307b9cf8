"""PyTorch's tests of `GradScaler`, as data: the tests of release 2.13, name by name."""

from enum import Enum
from typing import NamedTuple


class Needs(Enum):
    """What a test needs to run; the value completes the sentence "needs ..."."""

    NOTHING = "nothing but a CPU"
    LIFT = "a CPU, once its CUDA guard is lifted"
    COMPILER = "a CPU and a C++ compiler"
    CUDA = "a CUDA GPU"
    GPUS_2 = "2 CUDA GPUs"
    GPUS_4 = "4 CUDA GPUs"
    MPS = "an Apple GPU (MPS)"
    XPU = "an Intel GPU (XPU)"

    @property
    def cpu(self) -> bool:
        """True if a CPU is enough."""
        return self in (Needs.NOTHING, Needs.LIFT, Needs.COMPILER)


class Uses(Enum):
    """What a test calls: only SCALER tests can tell the two classes apart."""

    SCALER = "the scaler"
    OPS = "torch's operators and optimizers only"
    SHARDED = "ShardedGradScaler, which keeps torch's base class"


class Entry(NamedTuple):
    """One test of PyTorch.

    Attributes:
        file: Path below PyTorch's test folder.
        test: Name of the method, before PyTorch adds optimizer, device and dtype.
        instances: How many tests PyTorch makes of it on the device it needs; a newer
            release may make more.
    """

    file: str
    test: str
    instances: int
    needs: Needs
    uses: Uses = Uses.SCALER


_TORCH = "test_torch.py"
_CUDA = "test_cuda.py"
_MULTI = "test_cuda_multigpu.py"
_SHARDED = "distributed/fsdp/test_fsdp_sharded_grad_scaler.py"
_MIXED = "distributed/fsdp/test_fsdp_mixed_precision.py"
_FSDP2 = "distributed/_composable/fsdp/test_fully_shard_grad_scaler.py"
_INDUCTOR = "inductor/test_torchinductor.py"
_INVALID = "test_params_invalidated_with_grads_invalidated"
_LOW = "test_amp_foreach_non_finite_check_and_unscale_low_precision_grads"

INVENTORY = (
    Entry(_TORCH, "test_pickle_gradscaler", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_unscale", 2, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_update_scale", 1, Needs.NOTHING, Uses.OPS),
    Entry(_TORCH, "test_grad_scaling_unscale_sparse", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_state_dict", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_autocast", 9, Needs.NOTHING),
    Entry(_TORCH, f"{_INVALID}_between_unscale_and_step", 3, Needs.NOTHING),
    Entry(_TORCH, f"{_INVALID}_and_graph_partition", 3, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scale_will_not_overflow", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_clipping", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_clipping_separate_unscale", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_penalty", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_accumulation", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaling_multiple", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaler_pass_itself", 1, Needs.NOTHING),
    Entry(_TORCH, "test_grad_scaler_deprecated_warning", 1, Needs.NOTHING),
    Entry(
        "test_optim.py",
        "test_fused_does_not_step_if_foundinf",
        4,
        Needs.LIFT,
        Uses.OPS,
    ),
    Entry(_CUDA, "test_grad_scaling_autocast_fused_optimizers", 4, Needs.LIFT),
    Entry(_CUDA, "test_grad_scaler_with_preset_grad_scale", 8, Needs.CUDA),
    Entry(_CUDA, "test_graph_grad_scaling", 12, Needs.CUDA),
    Entry(_CUDA, "test_graph_scaling_fused_optimizers", 4, Needs.CUDA),
    Entry(_MULTI, "test_grad_scaling_device_as_key", 1, Needs.GPUS_2, Uses.OPS),
    Entry(_MULTI, "test_grad_scaling_scale", 1, Needs.GPUS_2),
    Entry(_MULTI, "test_grad_scaling_multigpu", 1, Needs.GPUS_2),
    Entry(_SHARDED, "test_grad_scaling", 1, Needs.LIFT, Uses.SHARDED),
    Entry(_SHARDED, "test_scaling_unscaling_sparse", 1, Needs.LIFT, Uses.SHARDED),
    Entry(_SHARDED, "test_inf_gradients_skip_optim_step", 1, Needs.LIFT, Uses.SHARDED),
    Entry(
        _SHARDED,
        "test_fsdp_ddp_parity_with_grad_scaler",
        16,
        Needs.GPUS_2,
        Uses.SHARDED,
    ),
    Entry(
        _SHARDED, "test_sharded_grad_scaler_found_inf", 1, Needs.GPUS_2, Uses.SHARDED
    ),
    Entry(
        _MIXED, "test_mixed_precision_e2e_full_shard", 33, Needs.GPUS_2, Uses.SHARDED
    ),
    Entry(_FSDP2, "test_gradient_scaler", 1, Needs.GPUS_4),
    Entry(
        "dynamo/test_repros.py",
        "test_amp_foreach_fake_impl",
        1,
        Needs.NOTHING,
        Uses.OPS,
    ),
    Entry(_INDUCTOR, "test_amp_update_scale", 1, Needs.COMPILER, Uses.OPS),
    Entry(
        _INDUCTOR,
        "test_amp_update_scale_lowering_no_graph_break",
        1,
        Needs.CUDA,
        Uses.OPS,
    ),
    Entry("test_mps.py", "test_gradscaler_mps", 1, Needs.MPS),
    Entry("test_mps.py", "test_non_fast_path_amp_unscale", 1, Needs.MPS),
    Entry("test_mps.py", _LOW, 3, Needs.MPS, Uses.OPS),
    # One for each fused optimizer; the number is not known, so at least one.
    Entry("test_xpu.py", "test_graph_scaling_fused_optimizers", 1, Needs.XPU),
    Entry("test_xpu.py", "test_graph_grad_scaling", 1, Needs.XPU),
)


def find(path: str, name: str) -> Entry | None:
    """Return the entry that the test method `name` of the file `path` belongs to.

    PyTorch appends optimizer, device and dtype to a name, and one name may begin with
    another: the longest that fits is meant.

    >>> find("test/test_torch.py", "test_grad_scaling_unscale_sparse_cpu_float32").test
    'test_grad_scaling_unscale_sparse'
    """
    fitting = [
        entry
        for entry in INVENTORY
        if f"/{path}".endswith(f"/{entry.file}")
        and f"{name}_".startswith(f"{entry.test}_")
    ]
    return max(fitting, key=lambda entry: len(entry.test), default=None)
