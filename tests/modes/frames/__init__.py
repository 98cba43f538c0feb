"""Queries for the checks of output modes, each with the codes reported for it in append, update and
complete mode.
"""

from tests.modes.frames import aggregations, functions, joins, stateless
from tests.modes.frames.frame import FRAMES, Frame, Inputs, inputs, settings_of

__all__ = [
    "FRAMES",
    "Frame",
    "Inputs",
    "aggregations",
    "functions",
    "inputs",
    "joins",
    "settings_of",
    "stateless",
]
