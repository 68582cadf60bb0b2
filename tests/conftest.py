"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from subprocess import TimeoutExpired
from typing import Protocol

import pytest
from training import Outcome, Scenario, launch


class Train(Protocol):
    def __call__(self, scenario: Scenario, world_size: int, *, patched: bool) -> Outcome: ...


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest) -> Train:
    """The outcome of a scenario, from one group of processes for all that this module needs.

    Those are the scenarios in the parameters of the selected tests.
    """
    wanted: dict[int, set[Scenario]] = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "scenario" in parameters:
            wanted.setdefault(parameters["world_size"], set()).add(parameters["scenario"])

    @cache
    def outcomes(world_size: int, patched: bool) -> Mapping[Scenario, Outcome | str]:
        scenarios = sorted(wanted[world_size], key=str)
        try:
            return launch(scenarios, world_size, patched=patched)
        except (RuntimeError, TimeoutExpired) as error:
            # Once is enough: every test of the group would wait for the same end.
            return dict.fromkeys(scenarios, str(error))

    def train(scenario: Scenario, world_size: int, *, patched: bool) -> Outcome:
        outcome = outcomes(world_size, patched)[scenario]
        if isinstance(outcome, str):
            pytest.fail(outcome)
        return outcome

    return train
