"""Finds pairs of accesses to the same bytes that no declared ordering puts in sequence.

Vector clocks: each stream knows, of every other stream, the last operation that is certain to have
run before its own next one. An operation is *ordered before* a stream's next one if the stream
knows it. The result does not depend on the schedule, nor on whether a number came out wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zerofix.testing.lines import Line

Clock = dict[int, int]
"""Stream to the number of its last operation that is known to have run."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, -1) < number:
            clock[stream] = number


@dataclass(frozen=True)
class Span:
    """The bytes of a strided tensor in its storage."""

    start: int
    """In bytes; all strides are non-negative, as torch's are."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    itemsize: int

    @property
    def end(self) -> int:
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.start + (last + 1) * self.itemsize

    @property
    def dense(self) -> bool:
        elements = 1
        for n in self.size:
            elements *= n
        return self.end - self.start == elements * self.itemsize

    def elements(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The offset of every byte, in no particular order."""
        offsets = np.arange(self.start, self.start + self.itemsize)
        for n, step in zip(self.size, self.stride, strict=True):
            offsets = (offsets[:, None] + np.arange(n) * (step * self.itemsize)).ravel()
        return offsets

    def overlaps(self, other: Span) -> bool:
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.dense and other.dense:
            return True
        return bool(np.isin(self.elements(), other.elements()).any())

    def covers(self, other: Span) -> bool:
        return self.dense and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class Access:
    """What one operation does to one tensor."""

    operation: str
    line: Line
    stream: int
    number: int
    writes: bool
    span: Span

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        span = f"bytes {self.span.start}..{self.span.end}"
        return f"{self.operation} on stream {self.stream} {verb} {span}\n    {self.line}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, one of them a write, in no declared order."""

    first: Access
    """The one that was issued first."""
    second: Access

    def __str__(self) -> str:
        return f"unordered pair:\n  {self.first}\n  {self.second}"


@dataclass(frozen=True)
class UnsafeFree:
    """Memory given back while another stream may still use it, without ``record_stream``."""

    access: Access
    stream: int
    """The stream that allocated the memory, and may get it again at once."""
    allocated: Line
    freed: Line
    reused: Line
    """The stream's next allocation, which may have got the same memory."""

    def __str__(self) -> str:
        return (
            f"unsafe free of memory of stream {self.stream}:\n  {self.access}\n"
            f"  allocated at\n    {self.allocated}\n  freed at\n    {self.freed}\n"
            f"  that stream's next allocation\n    {self.reused}"
        )


Report = Race | UnsafeFree


@dataclass
class Allocation:
    """A piece of memory from its allocation until it is freed."""

    stream: int
    line: Line
    recorded: set[int] = field(default_factory=set)
    """Streams named by ``record_stream``."""
    accesses: list[Access] = field(default_factory=list)
    """Those that a later one could still race with."""
    remains: list[Access] = field(default_factory=list)
    """Of the allocation that had this memory before, and not ordered before this one."""


class Checker:
    """Holds the clocks and collects reports, each pair of lines and streams once."""

    def __init__(self) -> None:
        self.host: Clock = {}
        """What the host has synchronised with, and so everything it issues from now on."""
        self.clocks: dict[int, Clock] = {}
        self.reports: list[Report] = []
        self.known: set[object] = set()

    def clock(self, stream: int) -> Clock:
        """What the stream's next operation comes after."""
        clock = self.clocks.setdefault(stream, {})
        join(clock, self.host)
        return clock

    def issue(self, stream: int, number: int) -> None:
        self.clock(stream)[stream] = number

    def access(self, allocation: Allocation, new: Access) -> list[int]:
        """Compare with the earlier accesses; the operation was issued just now.

        Returns the numbers of the operations that no declared ordering keeps from coming later.
        """
        clock = self.clock(new.stream)
        unordered, kept = [], []
        for old in allocation.accesses:
            ordered = old.number <= clock.get(old.stream, -1)
            if not ordered and (old.writes or new.writes) and old.span.overlaps(new.span):
                self.report(Race(old, new))
                unordered.append(old.number)
            # What the new access stands for need not be kept: whoever comes after it comes
            # after the old one, and whoever races with the old one races with it.
            stands_for = ordered and new.span.covers(old.span) and (new.writes or not old.writes)
            if not stands_for and old.number > self.host.get(old.stream, -1):
                kept.append(old)
        allocation.accesses = [*kept, new]
        if new.writes:
            unordered += [old.number for old in allocation.remains]
        return unordered

    def unordered(self, stream: int, accesses: list[Access]) -> list[Access]:
        """Those that the stream's next operation does not come after."""
        clock = self.clock(stream)
        return [access for access in accesses if access.number > clock.get(access.stream, -1)]

    def report(self, report: Report) -> None:
        accesses = (report.first, report.second) if isinstance(report, Race) else (report.access,)
        key = (type(report), *((a.operation, a.line, a.stream, a.writes) for a in accesses))
        if key not in self.known:
            self.known.add(key)
            self.reports.append(report)
