"""Saves DeepSpeedCPUAdam, loads it and goes on."""

from __future__ import annotations

import copy
from typing import Any

MEASURES = (
    "largest difference of a parameter after 60 steps of DeepSpeedCPUAdam to one whose training "
    "was saved and loaded on the way"
)
TOLERANCE = 0.0
_STEPS = 60
_POINTS = (10, 25, 40)


def run() -> float:
    """The largest error of three places to save."""
    from zerofix.repro._adam import apart, optimizer_of, step
    from zerofix.repro._training import quiet

    saved: dict[int, Any] = {}
    errors = []
    with quiet():
        optimizer, (expected,) = optimizer_of(1)
        for index in range(_STEPS):
            if index in _POINTS:
                saved[index] = copy.deepcopy((expected.detach(), optimizer.state_dict()))
            step(optimizer, [expected], index)
        for point, (value, state) in saved.items():
            # A native optimizer of its own, as in another process.
            optimizer, (parameter,) = optimizer_of(1)
            parameter.data.copy_(value)
            optimizer.load_state_dict(state)
            for index in range(point, _STEPS):
                step(optimizer, [parameter], index)
            errors.append(apart(expected, parameter))
    return max(errors)
