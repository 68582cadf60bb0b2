"""Takes zerofix and its settings to all processes of a job, on every node."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping

from zerofix import settings
from zerofix.hooks import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
"""The folder of the ``sitecustomize`` that imports zerofix."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with zerofix imported by every Python that is started with it.

    Not by one that ignores ``PYTHONPATH`` (``python -I``, ``-E``) or ``sitecustomize`` (``-S``).
    """
    return {**environ, "PYTHONPATH": _with_bootstrap(environ.get("PYTHONPATH", ""))}


def forward_settings() -> None:
    """Let DeepSpeed's launchers for several nodes take the ``ZEROFIX*`` variables along.

    They export variables of a fixed list of prefixes to other nodes, ``PYTHON`` among them.
    """
    when_imported("deepspeed.launcher.multinode_runner", _forward)


def _forward(module: str) -> None:
    runner: Any = getattr(sys.modules[module], "MultiNodeRunner", None)
    if hasattr(runner, "add_export") and not hasattr(runner, "forwards_zerofix"):
        runner.__init__ = _exporting(runner.__init__)
        runner.add_export = _bootstrap_first(runner.add_export)
        runner.forwards_zerofix = True


def _exporting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, value in settings.given().items():
            self.add_export(name, value)

    return __init__


def _bootstrap_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_export(self: Any, key: str, var: str) -> None:
        # DeepSpeed puts the working directory first: a sitecustomize there would hide ours.
        if key == "PYTHONPATH" and BOOTSTRAP in var.split(os.pathsep):
            var = _with_bootstrap(var)
        original(self, key, var)

    return add_export


def _with_bootstrap(path: str) -> str:
    others = [entry for entry in path.split(os.pathsep) if path and entry != BOOTSTRAP]
    return os.pathsep.join([BOOTSTRAP, *others])
