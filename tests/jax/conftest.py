"""Compiles each XLA program once per test process; no warning of GS114."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import gradscale.jax.state


@pytest.fixture(scope="session", autouse=True)
def shared_compilations(tmp_path_factory):
    """Keep compiled programs on disk, by content, for the other tests of this process.

    JAX's own cache goes by function, and most tests make new functions of the same
    programs. One folder per process: JAX does not write the files atomically.
    """
    folder = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A compilation during collection has settled that there is no cache.
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def scale_requested(monkeypatch):
    """Most tests call `update` with gradients of their own making."""
    monkeypatch.setattr(gradscale.jax.state, "_scale_requested", True)
