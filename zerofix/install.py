"""Applies and reverts fixes: the only module that writes to DeepSpeed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping

from zerofix import hooks
from zerofix.fix import Change, Fix
from zerofix.settings import Settings, asks_for, bucket_copy, suggest, toggle

TYPE_CHECKING = False
if TYPE_CHECKING:  # what the patching needs is imported with DeepSpeed, not with zerofix
    from types import ModuleType
    from typing import Any

    from zerofix.gate import State
    from zerofix.ranks import Digest
    from zerofix.report import FixStatus, Status
    from zerofix.source import Site


class NotAppliedError(RuntimeError):
    """A wanted fix could not be applied.

    Raised by ``zerofix.apply``, and by the import of DeepSpeed under ``ZEROFIX_STRICT=1``.
    """


class RanksDifferError(RuntimeError):
    """The ranks of a job do not run the same fixes. Raised where its first engine is made."""


class Patcher:
    """The fixes of a catalogue and what became of them in this process."""

    def __init__(self, catalogue: Iterable[Fix], settings: Settings, version: str) -> None:
        self._fixes = {fix.name: fix for fix in catalogue}
        self._settings = settings
        self._version = version
        self._lock = threading.RLock()
        # A fork waits for the whole of a fix: its child has no thread to finish it, nor to unlock.
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )
        self._imported: dict[str, ModuleType] = {}
        """Modules that are imported to their end, of those that matter here."""
        self._sites: dict[str, Site] = {}
        """Target path to the place, as DeepSpeed made it, of the targets looked at."""
        self._changes: dict[str, dict[str, Change]] = {}
        """Target path to the changes in force there, by fix, in their order."""
        self._installed: dict[str, Any] = {}
        """Target path to what was put there."""
        self._states: dict[str, tuple[State, str]] = {}
        """Fixes that are settled; the others wait for their modules."""
        self._off = {name: why for name, fix in self._fixes.items() if (why := self._why_off(fix))}
        """Fixes that nobody wants, and why."""

    def activate(self) -> None:
        """Apply every wanted fix, now or when DeepSpeed is imported."""
        if len(self._off) < len(self._fixes):
            self._watch()

    def apply(self, name: str) -> FixStatus:
        """Apply one fix, even one that the environment turns off.

        Before DeepSpeed is imported the fix stays pending, and is applied with the import.

        Raises:
            KeyError: no fix has this name; the nearest one is suggested.
            NotAppliedError: DeepSpeed's code is not recognised, or is somebody else's by now, or
                the fix needs another one that is not in force.
        """
        from zerofix.gate import State
        from zerofix.report import UNMET

        if name not in self._fixes:
            raise KeyError(f"no fix is called {name!r}.{suggest(name, self._fixes)}")
        with self._lock:
            self._off.pop(name, None)
            if name not in self._applied():
                self._states.pop(name, None)
            self._watch()
            self._settle_ready()
            status = self._status()[name]
        if status.state in UNMET or status.state is State.DISABLED:
            raise NotAppliedError(f"{name} is not applied ({status.state.value}): {status.reason}")
        return status

    def revert(self) -> Status:
        """Put back what was there before, and apply nothing more until ``apply`` asks for it.

        A fix stays whole where somebody else has patched over one of its targets since: it is in
        conflict, and the reason says with whom.
        """
        with self._lock:
            stay = {name for name in self._applied() if self._patched_over(self._fixes[name])}
            for path, changes in list(self._changes.items()):
                left = {name: change for name, change in changes.items() if name in stay}
                if left != changes:
                    self._write(path, left)
            if not stay:
                self._guard_ranks(False)
            for name in self._fixes:
                if name in stay:
                    over = self._patched_over(self._fixes[name])
                    self._say(f"zerofix: {name} is not reverted: {over}")
                elif name not in self._off:
                    self._off[name] = "reverted by zerofix.revert()"
                    self._states.pop(name, None)
            return self._status()

    def status(self) -> Status:
        """What became of every fix, so far."""
        with self._lock:
            if len(self._off) < len(self._fixes):
                self._watch()  # an import may have gone by our hooks
            return self._status()

    def site(self, path: str) -> Site | None:
        """The place of a target as DeepSpeed made it; None until a fix has looked at it."""
        return self._sites.get(path)

    def changes(self, path: str) -> Mapping[str, Change]:
        """Fix name to change, of the changes in force at a target."""
        return self._changes.get(path, {})

    # When modules arrive

    def _watch(self) -> None:
        modules = {target.module for fix in self._fixes.values() for target in fix.targets}
        # DeepSpeed itself comes last: with it, all is settled and summed up.
        for module in (*sorted(modules), "deepspeed"):
            if not self._is_here(module):
                hooks.when_imported(module, self._on_import)

    def _on_import(self, module: str) -> None:
        try:
            with self._lock:
                first = module not in self._imported
                self._imported[module] = sys.modules[module]
                if not self._is_here("deepspeed") and hooks.is_half_imported("deepspeed"):
                    # Its own hook comes, unless a finder of somebody else's is loading it.
                    hooks.when_imported("deepspeed", self._on_import)
                self._forget_reloaded(module)
                self._settle_ready()
                self._tell(summarise=first and module == "deepspeed")
        except NotAppliedError:
            raise
        except Exception as error:  # a defect of ours must not break the user's import
            if self._settings.strict:
                raise
            self._say(f"zerofix: {type(error).__name__}: {error}", every_node=True)

    def _tell(self, *, summarise: bool) -> None:
        from zerofix.report import UNMET, summary

        status = self._status()
        missing = [fix for fix in status.fixes if fix.state in UNMET]
        if missing and self._settings.strict:
            raise NotAppliedError(
                "; ".join(f"{f.name} is not applied ({f.state.value}): {f.reason}" for f in missing)
                + " (ZEROFIX_STRICT=1)"
            )
        if summarise and self._settings.log != "quiet":
            self._say(summary(status))
        if summarise and (late := self._late()):
            if self._settings.strict:
                raise NotAppliedError(f"{late} (ZEROFIX_STRICT=1)")
            self._say(late)

    def _late(self) -> str:
        """What to say of what was made before its code was repaired, if there is any."""
        from zerofix.late import importer, keepers

        made = keepers([self._sites[path] for path in self._changes])
        if not made:
            return ""
        return (
            f"zerofix: imported too late, at {importer()}. Already there, and not repaired for "
            f"certain: {', '.join(made)}. Import zerofix before they are made, best in the first "
            "line of the program, or start it with `zerofix run -- COMMAND`."
        )

    def _forget_reloaded(self, module: str) -> None:
        """Start over with the targets of a module that was imported anew."""
        from zerofix.source import owner_of

        stale = {
            path
            for path, site in self._sites.items()
            if path.startswith(module + ":")
            and owner_of(path, sys.modules[module]) is not site.owner
        }
        for path in stale:
            for table in (self._sites, self._changes, self._installed):
                table.pop(path, None)
        for fix in self._fixes.values():
            if any(target.path in stale for target in fix.targets):
                self._states.pop(fix.name, None)

    def _settle_ready(self) -> None:
        """Decide on every fix whose modules are there, and do as decided."""
        for fix in self._fixes.values():
            if fix.name not in self._off and fix.name not in self._states and not self._waits(fix):
                self._settle(fix)
        self._guard_ranks(self._settings.rank_check != "off")

    def _guard_ranks(self, guard: bool) -> None:
        """Have the first engine compare the ranks, or not."""
        from zerofix import ranks

        engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
        if engine is not None and guard:
            ranks.guard(engine, self._digest, self._report_ranks, self._say)
        elif engine is not None:
            ranks.unguard(engine)

    def _digest(self) -> Digest:
        """What must be the same on all ranks."""
        status = self.status()
        versions = {"zerofix": status.version, "DeepSpeed": str(status.deepspeed)}
        states = {fix.name: fix.state.value for fix in status.fixes}
        begins = "1" if asks_for("reduction_order") else "not 1"
        given = {"ZEROFIX_BUCKET_COPY": bucket_copy(), toggle("reduction_order"): begins}
        return versions | states | given

    def _report_ranks(self, difference: str, rank_0_knows: bool) -> None:
        if self._settings.rank_check == "error":
            raise RanksDifferError(difference)
        self._say(difference, every_rank=not rank_0_knows)

    def _settle(self, fix: Fix) -> None:
        from zerofix.edits import EditError
        from zerofix.gate import State
        from zerofix.report import UNMET
        from zerofix.source import Foreign, Unreadable

        try:
            state, reason = self._apply(fix)
        except Foreign as error:
            state, reason = State.CONFLICT, str(error)
        except (Unreadable, EditError) as error:
            state, reason = State.UNRECOGNISED, str(error)
        except Exception as error:
            state, reason = State.FAILED, f"{type(error).__name__}: {error}"
        self._states[fix.name] = (state, reason)
        if state in UNMET:
            self._say(
                f"zerofix: {fix.name} is NOT applied ({state.value}): {reason}. "
                f"{toggle(fix.name)}=0 silences this, ZEROFIX_STRICT=1 makes it an error.",
                every_node=True,
            )
        elif self._settings.log == "debug":
            self._say(f"zerofix: {fix.name}: {state.value}: {reason}")

    # Applying

    def _apply(self, fix: Fix) -> tuple[State, str]:
        from zerofix.gate import State, decide
        from zerofix.source import ABSENT, Foreign, locate

        fingerprints = {}
        for target in fix.targets:
            path = target.path
            if path not in self._sites:
                module = sys.modules.get(target.module)  # not every release has it
                site = locate(path, module) if module else None
                if site is None:
                    fingerprints[path] = ABSENT
                    continue
                self._sites[path] = site
            elif party := self._stranger(self._sites[path]):
                raise Foreign(f"{path} was replaced by {party}")
            fingerprints[path] = self._sites[path].fingerprint
        force = self._settings.forces(fix.name)
        decision = decide(fix, fingerprints, self._deepspeed_version(), force=force)
        if decision.apply:
            if missing := [name for name in fix.needs if name not in self._applied()]:
                return State.DISABLED, f"it needs {', '.join(missing)}, which is not in force"
            self._write_all(fix)
        return decision.state, decision.reason

    def _write_all(self, fix: Fix) -> None:
        """All targets of a fix, or none: whatever goes wrong, what was written is put back."""
        before = {target.path: dict(self.changes(target.path)) for target in fix.targets}
        built = {
            target.path: self._build(target.path, before[target.path] | {fix.name: target.change})
            for target in fix.targets
        }
        try:
            for target in fix.targets:
                self._put(
                    target.path, built[target.path], before[target.path] | {fix.name: target.change}
                )
        except BaseException:
            for path, changes in before.items():
                self._write(path, changes)
            raise

    def _write(self, path: str, changes: dict[str, Change]) -> None:
        self._put(path, self._build(path, changes), changes)

    def _build(self, path: str, changes: Mapping[str, Change]) -> Any:
        from zerofix.edits import build

        return build(self._sites[path], list(changes.values()))

    def _put(self, path: str, attribute: Any, changes: dict[str, Change]) -> None:
        site = self._sites[path]
        setattr(site.owner, site.name, attribute)
        if changes:
            self._changes[path], self._installed[path] = changes, attribute
        else:
            self._changes.pop(path, None)
            self._installed.pop(path, None)

    # Looking

    def _stranger(self, site: Site) -> str | None:
        """Who else has changed the target since we last did."""
        from zerofix.source import party

        now = vars(site.owner).get(site.name)
        return None if now is self._installed.get(site.path, site.attribute) else party(now)

    def _patched_over(self, fix: Fix) -> str | None:
        for target in fix.targets:
            site = self._sites.get(target.path)
            if site and target.path in self._installed and (party := self._stranger(site)):
                return f"{target.path} has been patched over by {party}"
        return None

    def _is_here(self, module: str) -> bool:
        """Whether a module is imported to its end, and is still the one that was."""
        return module in self._imported and sys.modules.get(module) is self._imported[module]

    def _waits(self, fix: Fix) -> list[str]:
        """The modules that must be imported before the fix can be settled.

        DeepSpeed itself among them: before its end it has no version, and nobody trains with it.
        """
        if not self._is_here("deepspeed"):
            return ["deepspeed"]
        modules = {target.module for target in fix.targets}
        return sorted(m for m in modules if not self._is_here(m) and _may_come(m))

    def _status(self) -> Status:
        from zerofix.report import FixStatus, Status

        return Status(
            version=self._version,
            deepspeed=self._deepspeed_version() if "deepspeed" in sys.modules else None,
            settings=self._settings.given,
            fixes=tuple(
                FixStatus(
                    fix.name,
                    fix.title,
                    *self._state(fix),
                    targets=tuple(target.path for target in fix.targets),
                    upstream=fix.upstream,
                    not_reached=tuple(self._overriding(fix)),
                    modes=fix.modes() if fix.modes and fix.name in self._applied() else (),
                )
                for fix in self._fixes.values()
            ),
        )

    def _applied(self) -> set[str]:
        return {name for changes in self._changes.values() for name in changes}

    def _state(self, fix: Fix) -> tuple[State, str]:
        from zerofix.gate import State

        if fix.name in self._applied() and (over := self._patched_over(fix)):
            return State.CONFLICT, over
        if fix.name in self._states:
            return self._states[fix.name]
        if fix.name in self._off:
            return State.DISABLED, self._off[fix.name]
        return State.PENDING, f"waits for the import of {', '.join(self._waits(fix))}"

    def _why_off(self, fix: Fix) -> str:
        if not self._settings.enabled:
            return "ZEROFIX=0"
        if not self._settings.wants(fix.name):
            return f"{toggle(fix.name)}=0"
        return ""

    def _overriding(self, fix: Fix) -> Iterator[str]:
        from zerofix.source import subclasses

        for target in fix.targets:
            site = self._sites.get(target.path)
            if site is not None and isinstance(site.owner, type):
                for subclass in subclasses(site.owner):
                    override = vars(subclass).get(site.name)
                    code = getattr(override, "__code__", None)
                    # One that calls super() gets here all the same.
                    if override is not None and "__class__" not in getattr(code, "co_freevars", ()):
                        yield f"{subclass.__module__}:{subclass.__qualname__}.{site.name}"

    @staticmethod
    def _deepspeed_version() -> str:
        return str(getattr(sys.modules.get("deepspeed"), "__version__", ""))

    def _say(self, text: str, *, every_node: bool = False, every_rank: bool = False) -> None:
        """Write to stderr, on rank 0 only (or on the first rank of every node, or on all)."""
        wanted = self._settings.first_on_node if every_node else self._settings.first_rank
        if (wanted or every_rank) and sys.stderr is not None:
            # A closed pipe or a full disk under stderr is no reason to fail.
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)


def _may_come(module: str) -> bool:
    """Whether there is such a module, or a package that may have it. Imports nothing."""
    from importlib.util import find_spec

    package = module.rpartition(".")[0]
    # To look into a package, find_spec would import it.
    if package and package not in sys.modules:
        return _may_come(package)
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:  # the package is a module
        return False
