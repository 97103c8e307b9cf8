"""The error of the apex room, under every class that apex raises for the same."""

from gradscale.errors import ConfigError


class AmpError(ConfigError, RuntimeError, TypeError):
    """A setting or an argument that can never work.

    A `ConfigError` that `except RuntimeError`, `TypeError` and `AssertionError` catch
    too: apex raises these three.
    """
