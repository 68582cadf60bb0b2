"""The records: a fix, its targets, and the three kinds of change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TYPE_CHECKING = False  # importing typing would take a good part of the time of import zerofix
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training


@dataclass(frozen=True)
class Edit:
    """Exchange one piece of the installed source for another.

    Both are Python, and are matched as syntax trees: formatting and comments do not count.
    ``find`` is one expression, or one or more statements that follow each other.
    """

    find: str
    put: str
    times: int = 1
    """How often ``find`` must match: any other number of matches means unknown code."""


@dataclass(frozen=True)
class Around:
    """Run code before or after the original, which is called unchanged or with one edit."""

    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Takes the original, returns a ``functools.wraps`` closure around it."""
    edit: Edit | None = None
    """An edit of the original that goes with that code."""


@dataclass(frozen=True)
class Replace:
    """Put a body of our own in the original's place."""

    body: Callable[..., Any]


Change = Edit | Around | Replace


@dataclass(frozen=True)
class Target:
    """A function of DeepSpeed and the change that a fix makes to it."""

    path: str
    """``package.module:Class.function``"""
    change: Change

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]


@dataclass(frozen=True)
class Fix:
    """One repaired defect. All its targets are changed, or none."""

    name: str
    title: str
    symptom: str
    """What a user sees, and with which configuration."""
    cause: str
    upstream: tuple[str, ...]
    """Issue and pull request numbers of DeepSpeed, the fixing one first: ``("#7981", ...)``."""
    introduced: str | None
    """First release that has the defect; None when every supported release before `fixed` has."""
    fixed: str | None
    """First release without it; None when no release is."""
    hit_by: Callable[[Training], bool | str]
    """Whether a training on a release with the defect meets it; a string is the condition on what
    is not in the configuration: ``"if a parameter is larger than the bucket"``."""
    targets: tuple[Target, ...]
    needs: tuple[str, ...] = ()
    """Fixes without which this one would do harm. They come before it in the catalogue."""
    limits: str = ""
    """What of the defect is left, where something is."""
    modes: Callable[[], tuple[str, ...]] | None = None
    """Tells how it works in this process, where that is decided at run time."""
