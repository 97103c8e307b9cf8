"""Loss scaling and diagnosis for half-precision training.

>>> import gradscale
>>> gradscale.DynamicScale().init_state().scale
65536.0
"""

from gradscale.core.foreign_checkpoint import import_state
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, NoScale, Policy, StaticScale
from gradscale.core.records import StepRecord, Verdict, classify
from gradscale.core.state import PYTHON, FixedState, Observed, RuleOps, ScaleState
from gradscale.errors import (
    AmpError,
    ConfigError,
    GradientError,
    GradscaleError,
    GradscaleWarning,
    HopelessRun,
    OrderError,
    ScaleCollapsed,
    StateError,
)

__version__ = "0.1.0"

__all__ = [
    "PYTHON",
    "AmpError",
    "ConfigError",
    "DynamicScale",
    "FixedState",
    "GradientError",
    "GradscaleError",
    "GradscaleWarning",
    "HopelessRun",
    "NoScale",
    "Observed",
    "OrderError",
    "Policy",
    "RuleOps",
    "ScaleCollapsed",
    "ScaleState",
    "StateError",
    "StaticScale",
    "StepOutcome",
    "StepRecord",
    "Verdict",
    "classify",
    "import_state",
]
