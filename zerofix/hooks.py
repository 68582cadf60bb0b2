"""Calls back when a module has been imported.

``wrapt`` has such hooks as well, but importing it costs more than all of ``import zerofix`` may,
and it calls back at once for a module that another thread has only half imported.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Callback = Callable[[str], None]

_callbacks: dict[str, Callback] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(name)`` whenever ``name`` has been imported, and at once if it is already.

    Also after a reload, and after an import that another thread (or a caller further up) has
    begun. What the callback raises, the import raises. A name has one callback.
    """
    _callbacks[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    if module is None:
        return
    if is_half_imported(name):
        _observe(module.__spec__, module, callback)
    else:
        callback(name)


def is_half_imported(name: str) -> bool:
    """Whether an import of the module has begun and not come to its end."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _Finder:
    """Wraps the loaders of the modules that somebody waits for."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Other finders of this kind ask the import system again, and so us: once is enough.
        if name not in _callbacks or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        if hasattr(spec.loader, "exec_module"):
                            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                        return spec
        finally:
            self._asking.name = None
        return None


class _Loader:
    """Loads as the real loader does, which it leaves in its place, then calls back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _callbacks[module.__name__](module.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy asks before there is a _loader
            raise AttributeError(name)
        return getattr(self._loader, name)


def _observe(spec: Any, module: ModuleType, callback: Callback) -> None:
    """Call back when an import that has begun is complete.

    The import system marks a module's spec while it runs the module. To see the mark go, the
    spec gets a class of its own until then.
    """
    plain = type(spec)
    if plain.__qualname__ == "_observe.<locals>.Observed":
        return

    class Observed(plain):  # type: ignore[misc, valid-type]
        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__["_initializing"])

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                finish()

    once = threading.Lock()

    def finish() -> None:
        if not once.acquire(blocking=False):
            return
        spec.__class__ = plain
        if sys.modules.get(spec.name) is module:  # else the import failed
            try:
                callback(spec.name)
            except BaseException:
                sys.modules.pop(spec.name, None)
                raise

    spec.__class__ = Observed
    if not spec.__dict__["_initializing"]:  # it went while we looked
        finish()
