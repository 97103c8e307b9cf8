"""Two virtual CPUs for the tests of strategies and distributions."""

import os

from tests.keras.suite import ENVIRONMENT, split_cpu

if os.environ.get(ENVIRONMENT) == "tensorflow":
    split_cpu()
if os.environ.get(ENVIRONMENT) == "jax":
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
