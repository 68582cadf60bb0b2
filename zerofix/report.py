"""States of the fixes, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerofix.gate import State

UNMET = (State.UNRECOGNISED, State.CONFLICT, State.FAILED)
"""States of a fix that is wanted and not there."""


@dataclass(frozen=True)
class FixStatus:
    """One fix and what became of it."""

    name: str
    title: str
    state: State
    reason: str
    targets: tuple[str, ...]
    upstream: tuple[str, ...]
    not_reached: tuple[str, ...]
    """Subclasses that override a target: ``module:Class.function``. The fix does not reach
    them."""
    modes: tuple[str, ...] = ()
    """How it works in this process, where that is decided at run time."""

    @property
    def links(self) -> tuple[str, ...]:
        """Web addresses of the upstream issues and pull requests."""
        return tuple(
            f"https://github.com/deepspeedai/DeepSpeed/issues/{number.lstrip('#')}"
            for number in self.upstream
        )


@dataclass(frozen=True)
class Status:
    """What zerofix has done in this process."""

    version: str
    deepspeed: str | None
    """Version of DeepSpeed; None while it is not imported."""
    fixes: tuple[FixStatus, ...]
    settings: Mapping[str, str]
    """The ``ZEROFIX*`` environment variables that are set."""

    @property
    def ok(self) -> bool:
        """No wanted fix is missing."""
        return not any(fix.state in UNMET for fix in self.fixes)

    def __getitem__(self, name: str) -> FixStatus:
        return next(fix for fix in self.fixes if fix.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self) | {"ok": self.ok}


def summary(status: Status) -> str:
    """The line that tells what an activation did."""
    applied = names(status.fixes, State.APPLIED)
    text = f"zerofix {status.version}: DeepSpeed {status.deepspeed}: "
    if applied:
        plural = "" if len(applied) == 1 else "es"
        text += f"{len(applied)} fix{plural} applied ({', '.join(applied)})"
    else:
        text += "no fix applied"
    for state in State:
        if state is not State.APPLIED and names(status.fixes, state):
            text += f"; {state.value}: {', '.join(names(status.fixes, state))}"
    return text + ("; ZEROFIX=0 turns it off" if applied else "")


def names(fixes: Sequence[FixStatus], state: State) -> list[str]:
    return [fix.name for fix in fixes if fix.state is state]
