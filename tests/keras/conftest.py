"""Two virtual CPUs for the tests of TensorFlow's strategies."""

import os

from tests.keras.suite import ENVIRONMENT, split_cpu

if os.environ.get(ENVIRONMENT) == "tensorflow":
    split_cpu()
if os.environ.get(ENVIRONMENT) == "jax":
    # Less work for the compiler: the models are tiny.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
