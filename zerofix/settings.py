"""Reads the environment: the only module that does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "ZEROFIX"

# The general settings and what each may be; the first value is the default. Every fix adds
# ZEROFIX_<NAME> with the values of FIX_VALUES.
GENERAL: dict[str, tuple[str, ...]] = {
    "ZEROFIX": ("1", "0"),
    "ZEROFIX_STRICT": ("0", "1"),
    "ZEROFIX_LOG": ("summary", "quiet", "debug"),
    "ZEROFIX_BUCKET_COPY": ("auto", "triton", "torch"),
    "ZEROFIX_RANK_CHECK": ("error", "warn", "off"),
}
FIX_VALUES = ("1", "0", "force")

# How torchrun and DeepSpeed, Open MPI, MPICH and Slurm number the processes of a job.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class SettingsError(ValueError):
    """An unknown ``ZEROFIX_*`` variable or value.

    Raised by ``import zerofix``: a misspelt toggle must never mean a fix that is silently off.
    """


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    enabled: bool
    strict: bool
    log: str
    rank_check: str
    fixes: Mapping[str, str]
    """Fix name to ``"1"``, ``"0"`` or ``"force"``, for the fixes the environment names."""
    given: Mapping[str, str]
    """The ``ZEROFIX*`` variables as they were set."""
    first_rank: bool
    """This process is rank 0 of the job, or there is no launcher."""
    first_on_node: bool
    """This process is the first of its node."""

    def wants(self, fix: str) -> bool:
        return self.enabled and self.fixes.get(fix) != "0"

    def forces(self, fix: str) -> bool:
        return self.fixes.get(fix) == "force"


def toggle(fix: str) -> str:
    """The environment variable that switches ``fix``."""
    return f"{PREFIX}_{fix.upper()}"


def read(fixes: Iterable[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings for the fixes of these names.

    Raises:
        SettingsError: a ``ZEROFIX_*`` name or value that is not known; it names the nearest
            right one.
    """
    fix_of = {toggle(fix): fix for fix in fixes}
    allowed = GENERAL | dict.fromkeys(fix_of, FIX_VALUES)
    found = given(environ)
    for name, value in found.items():
        if name not in allowed:
            raise SettingsError(f"{name} is not a setting of zerofix.{suggest(name, allowed)}")
        _check(name, value, allowed[name])

    def setting(name: str) -> str:
        return found.get(name, GENERAL[name][0])

    return Settings(
        enabled=setting("ZEROFIX") == "1",
        strict=setting("ZEROFIX_STRICT") == "1",
        log=setting("ZEROFIX_LOG"),
        rank_check=setting("ZEROFIX_RANK_CHECK"),
        fixes={fix: found[name] for name, fix in fix_of.items() if name in found},
        given=found,
        first_rank=_first(environ, _RANK),
        first_on_node=_first(environ, _LOCAL_RANK),
    )


def given(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The ``ZEROFIX*`` variables that are set, whatever they say."""
    return {
        name: value
        for name, value in environ.items()
        if value and (name == PREFIX or name.startswith(PREFIX + "_"))
    }


def bucket_copy(environ: Mapping[str, str] = os.environ) -> str:
    """How ``zerofix.kernels`` copies: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        SettingsError: the value is none of these.
    """
    allowed = GENERAL["ZEROFIX_BUCKET_COPY"]
    value = environ.get("ZEROFIX_BUCKET_COPY") or allowed[0]
    _check("ZEROFIX_BUCKET_COPY", value, allowed)
    return value


def asks_for(fix: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns a fix on by name."""
    return environ.get(toggle(fix)) in ("1", "force")


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """How often torchrun has started the ranks again; ``"0"`` without it."""
    return environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(
            f"{name}={value!r} is not understood; it takes {', '.join(allowed)}."
            f"{suggest(value, allowed)}"
        )


def _first(environ: Mapping[str, str], variables: Iterable[str]) -> bool:
    return next((environ[name] for name in variables if environ.get(name)), "0") == "0"


def suggest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean X?`` for the nearest known word, else the list of them."""
    import difflib

    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}."
