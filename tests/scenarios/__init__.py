"""Small programs of the kinds that public bug reports describe, in a registry.

Each class has a comment that names the reports. The tests run them under several policies and compare.
"""

from . import aliasing, kinds, modes, numerics, shapes
from .base import Scenario

SCENARIOS = [
    *aliasing.SCENARIOS,
    *shapes.SCENARIOS,
    *kinds.SCENARIOS,
    *numerics.SCENARIOS,
    *modes.SCENARIOS,
]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

__all__ = ["BY_NAME", "SCENARIOS", "Scenario"]
