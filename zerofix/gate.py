"""Fix + installed DeepSpeed -> decision. Touches nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any

from packaging.version import InvalidVersion, Version

from zerofix.fix import Fix
from zerofix.source import ABSENT


class State(str, Enum):
    """What became of a fix."""

    APPLIED = "applied"
    PENDING = "pending"
    FIXED_UPSTREAM = "fixed-upstream"
    NOT_AFFECTED = "not-affected"
    DISABLED = "disabled"
    UNRECOGNISED = "unrecognised"
    CONFLICT = "conflict"
    FAILED = "failed"


@dataclass(frozen=True)
class Decision:
    """What to do with a fix, and why."""

    apply: bool
    state: State
    """The state to report when `apply` is false, and after a successful application."""
    reason: str


@functools.cache
def known_bodies() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Fix name -> target path -> fingerprint -> ``wrong``, ``right`` or ``either``.

    ``either`` is a body that releases with and without the defect share.
    """
    verdicts: Mapping[str, Mapping[str, Mapping[str, str]]] = _table()["verdicts"]
    return verdicts


def known_releases() -> list[str]:
    """The releases of DeepSpeed that zerofix knows, the oldest first."""
    releases: list[str] = _table()["releases"]
    return releases


@functools.cache
def _table() -> Any:
    return json.loads(resources.files("zerofix").joinpath("releases.json").read_text())


def has_defect(fix: Fix, version: str) -> bool:
    """Whether the release of this version has the defect, by what the record says."""
    return _place(fix, version) == "within"


def decide(fix: Fix, fingerprints: Mapping[str, str], version: str, *, force: bool) -> Decision:
    """Whether to apply ``fix`` to a DeepSpeed with these bodies.

    Args:
        fingerprints: target path to the fingerprint of the installed body.
        version: what DeepSpeed says its version is. It words the reason; the bodies decide.
        force: apply to a body that no release has, if the edits match (``ZEROFIX_<FIX>=force``).
    """
    bodies = known_bodies().get(fix.name, {})
    verdicts = {
        path: bodies.get(path, {}).get(found, "unknown") for path, found in fingerprints.items()
    }
    unknown = [path for path, verdict in verdicts.items() if verdict == "unknown"]
    kinds = set(verdicts.values())
    if unknown:
        reason = f"no release has this body of {', '.join(map(short, unknown))}"
        if force and ABSENT not in fingerprints.values():
            return Decision(True, State.APPLIED, f"forced: {reason}")
        return Decision(False, State.UNRECOGNISED, reason)
    if {"wrong", "right"} <= kinds:
        right = ", ".join(short(path) for path, v in verdicts.items() if v == "right")
        return Decision(False, State.UNRECOGNISED, f"repaired in part: {right} is right already")
    place = _place(fix, version)
    # Where the bodies are the same with and without the defect, only the version can tell.
    if "wrong" in kinds or ("right" not in kinds and place in ("within", "nowhere")):
        if place == "within":
            return Decision(True, State.APPLIED, f"DeepSpeed {version} has the defect")
        unexpected = f"DeepSpeed {version or 'of unknown version'}"
        unexpected += (
            " should not have the defect, but the installed source has it"
            if "wrong" in kinds
            else ": its source is that of releases with the defect and of others without"
        )
        return Decision(True, State.APPLIED, unexpected)
    if place == "before":
        return Decision(
            False, State.NOT_AFFECTED, f"the defect came with DeepSpeed {fix.introduced}"
        )
    return Decision(False, State.FIXED_UPSTREAM, f"DeepSpeed {version} has it right")


def short(path: str) -> str:
    """The last two parts of a target path: ``Class.function``."""
    return ".".join(path.partition(":")[2].split(".")[-2:])


def _place(fix: Fix, version: str) -> str:
    """Where a version lies to the releases with the defect: before, within, after or nowhere."""
    try:
        installed = Version(version)
    except InvalidVersion:
        return "nowhere"
    if fix.introduced and Version(installed.base_version) < Version(fix.introduced):
        return "before"
    if fix.fixed and installed >= Version(fix.fixed):
        return "after"
    return "within"
