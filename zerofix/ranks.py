"""All ranks run the same code, or training does not start.

Each rank publishes its digest in the store of the process group, rank 0 reads them all and
publishes one verdict: a handful of requests a rank, and none of them a collective, which a rank
without zerofix would hang. There are two waits. One is before DeepSpeed constructs the engine, so
that ranks that differ do not meet in its collectives; a rank that is missing there may be late.
The other is after it, where none can be: the construction has collectives of its own, and a rank
with zerofix publishes before it reaches them.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import groupby

from zerofix.settings import attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Digest = Mapping[str, str]
"""What must be equal on all ranks: name to value."""

WAIT = 8.0
"""Seconds that rank 0 waits for the others, before the construction of an engine and after."""
GRACE = 2.0
"""Seconds that the others wait longer for rank 0, and it for them to read that it will fail."""
_HELP = (
    "Give all ranks the same packages and ZEROFIX* variables (`zerofix run -- COMMAND` takes the "
    "variables to every node). ZEROFIX_RANK_CHECK=warn trains all the same."
)


def guard(
    engine: Any,
    digest: Callable[[], Digest],
    report: Callable[[str, bool], None],
    warn: Callable[[str], None],
) -> None:
    """Compare the ranks when the first engine of a process group is made.

    Args:
        engine: the class ``DeepSpeedEngine``.
        digest: what this rank publishes.
        report: where ranks differ, is called on each with how, and whether rank 0 knows it too.
        warn: is called where they cannot be compared, with the reason.
    """
    original = engine.__init__
    if hasattr(original, "zerofix_guard"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        check = None

        def compare(step: Callable[[], str]) -> None:
            try:
                text = step()
            except Exception as error:  # a defect of ours must not end the user's training
                return warn(f"zerofix: the ranks are not compared: {error}")
            if text:
                report(text, check is None or check.rank_0_knows)
            return None

        def before() -> str:
            nonlocal check
            check = _check_of_this_process(digest)
            return check.before() if check else ""

        try:
            compare(before)
        except BaseException:
            # The engine's __del__ calls it, and what it is for has not been made yet.
            vars(self)["destroy"] = lambda: None
            raise
        original(self, *args, **kwargs)
        if check is not None:
            compare(check.after)

    __init__.zerofix_guard = __init__  # type: ignore[attr-defined]
    engine.__init__ = __init__


def unguard(engine: Any) -> None:
    """Undo ``guard``, unless somebody has patched over it."""
    init = engine.__init__
    if getattr(init, "zerofix_guard", None) is init:
        engine.__init__ = vars(init)["__wrapped__"]


_compared: Callable[[], Any] = lambda: None  # noqa: E731
"""The process group that was the last to make its first engine."""


def _check_of_this_process(digest: Callable[[], Digest]) -> Check | None:
    """The check of the first engine; None when there is nothing to compare."""
    global _compared
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or _compared() is dist.group.WORLD:
        return None
    _compared = weakref.ref(dist.group.WORLD)
    if dist.get_world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    if store is None:
        raise LookupError("the process group has no store, as with MPI for a backend")
    # torchrun keeps its store, and what is in it, when it starts the ranks again.
    store = dist.distributed_c10d.PrefixStore(f"zerofix/{attempt()}", store)
    return Check(store, dist.get_rank(), dist.get_world_size(), digest())


class Check:
    """The comparison of all ranks, as one of them goes through it."""

    def __init__(self, store: Any, rank: int, world_size: int, digest: Digest) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._settled = False
        """Whether rank 0 has come to a verdict on all ranks, as far as is known here."""
        self.rank_0_knows = True
        store.set(_key(rank), json.dumps(digest))

    def before(self) -> str:
        """How the ranks differ, of those that are there; empty when they do not."""
        if self._rank != 0:
            return self._read("first", WAIT + GRACE) or ""
        digests = self._published(WAIT)
        text = differences(digests)
        if text or len(digests) == self._world_size:
            return self._settle(text, readers=len(digests) - 1)
        self._store.set("first", json.dumps([False, "", 0]))
        return ""

    def after(self) -> str:
        """The same, where a rank that is not there now counts as different."""
        if self._settled:
            return ""
        if self._rank == 0:
            digests = self._published(WAIT)
            text = differences(digests, range(self._world_size))
            return self._settle(text, readers=len(digests) - 1)
        verdict = self._read("first", WAIT + GRACE)
        if verdict is not None and not self._settled:
            verdict = self._read("last", WAIT + GRACE)
        if verdict is None:
            self.rank_0_knows = False
            ended = self._store.check([_key(0)])
            return message(["rank 0 has ended"] if ended else [absence([0])])
        return verdict

    def _published(self, seconds: float) -> dict[int, Digest]:
        """Rank to digest, of all ranks or of those that publish within this time."""
        ranks = list(range(self._world_size))
        try:
            self._store.wait([_key(rank) for rank in ranks], timedelta(seconds=seconds))
        except RuntimeError:
            ranks = [rank for rank in ranks if self._store.check([_key(rank)])]
        found = self._store.multi_get([_key(rank) for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, found, strict=True)}

    def _settle(self, text: str, *, readers: int) -> str:
        """Publish the verdict; one that ends this process, and its store, is read by all before."""
        self._settled = True
        for name in ("first", "last"):
            self._store.set(name, json.dumps([True, text, readers]))
        if text and readers:
            self._has("all have read", GRACE)
        return text

    def _read(self, verdict: str, seconds: float) -> str | None:
        """The text of a verdict of rank 0; None when there is none within this time."""
        if not self._has(verdict, seconds):
            return None
        self._settled, text, readers = json.loads(self._store.get(verdict))
        if text and self._store.add("have read", 1) == readers:
            self._store.set("all have read", "")
        return str(text)

    def _has(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # DistStoreError: it is not there in time
            return False
        return True


def _key(rank: int) -> str:
    return f"rank {rank}"


def differences(digests: Mapping[int, Digest], ranks: Iterable[int] = ()) -> str:
    """How the digests differ, and which of ``ranks`` have none; empty when neither is so."""
    lines = []
    for name in dict.fromkeys(name for digest in digests.values() for name in digest):
        ranks_of: dict[str, list[int]] = {}
        for rank, digest in digests.items():
            ranks_of.setdefault(digest.get(name, "not known"), []).append(rank)
        # A fix that waits for a module comes with it, unless it is turned off.
        alike = ranks_of.keys() - {"pending"} if "disabled" not in ranks_of else ranks_of
        if len(alike) > 1:
            lines.append(f"{name}: " + "; ".join(f"{v} on {_of(r)}" for v, r in ranks_of.items()))
    absent = [rank for rank in ranks if rank not in digests]
    return message(lines + [absence(absent)] * bool(absent))


def absence(ranks: list[int]) -> str:
    return (
        f"no zerofix on {_of(ranks)}: it is not imported there before deepspeed.initialize, or "
        "turned off (ZEROFIX=0 or ZEROFIX_RANK_CHECK=off)"
    )


def message(lines: list[str]) -> str:
    if not lines:
        return ""
    return "\n  ".join(["zerofix: the ranks do not run the same code:", *lines]) + f"\n{_HELP}"


def _of(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    spans = []
    for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        spans.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
