"""Finds what took DeepSpeed's code before zerofix had repaired it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from zerofix.source import Site, subclasses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def keepers(sites: Sequence[Site]) -> list[str]:
    """What has the code of targets as it was: instances of their classes, and names in modules.

    To find them takes 40 ms, as long as all else that an import of zerofix does. So nobody looks
    before there is a process group, which every engine needs, or a DeepSpeedCPUAdam.
    """
    if not _can_be():
        return []
    classes = {site.owner for site in sites if isinstance(site.owner, type)}
    classes.update(*map(subclasses, list(classes)))
    functions = {id(site.attribute): site.name for site in sites}
    found = set()
    for holder in gc.get_referrers(*classes, *(site.attribute for site in sites)):
        if type(holder) in classes:
            found.add(type(holder).__qualname__)
        elif isinstance(holder, dict) and (module := _module_of(holder)):
            names = [name for name, value in holder.items() if id(value) in functions]
            found.update(f"{module}.{name}" for name in names)
    return sorted(found)


def importer() -> str:
    """Where zerofix is imported: ``train.py:3``."""
    frame: Any = sys._getframe()
    while frame.f_back and _package(frame) in ("zerofix", "importlib"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _can_be() -> bool:
    distributed: Any = sys.modules["torch.distributed"]
    adam = getattr(sys.modules.get("deepspeed.ops.adam.cpu_adam"), "DeepSpeedCPUAdam", None)
    world = distributed.is_available() and distributed.is_initialized()
    return bool(world or getattr(adam, "optimizer_id", 0))  # it counts its instances


def _module_of(namespace: dict[Any, Any]) -> str | None:
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and vars(module) is namespace else None
