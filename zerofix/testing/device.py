"""The virtual device: streams, events, memory, and the queue of what did not run yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zerofix.testing.checker import Access, Allocation, Checker, Clock, Report, Span, join
from zerofix.testing.lines import caller
from zerofix.testing.memory import Memory, Place
from zerofix.testing.scheduler import Operation, Queue, Schedule


class Device:
    """One virtual device. ``virtual_streams`` makes it, and only one is in use at a time."""

    reports: list[Report]
    """Unordered pairs and unsafe frees, in the order they were found."""
    counts: Counter[str]
    """How often the program called each of ``record``, ``wait_event``, ``wait_stream``,
    ``synchronize`` (of a stream, an event or the device) and ``record_stream``."""

    def __init__(self, schedule: Schedule) -> None:
        self.queue = Queue(schedule)
        self.checker = Checker()
        self.reports = self.checker.reports
        self.counts = Counter()
        self.memory = Memory(self.checker, self.queue)
        self.operations = 0
        self.communicators: dict[str, Stream] = {}
        self.last_collective: Operation | None = None
        self.handles: list[object] = []
        self.streams = 0
        self.default = Stream(device=self)
        self.current = self.default

    def issue(
        self,
        name: str,
        stream: Stream,
        run: Callable[[], None] | None = None,
        *,
        reads: Sequence[tuple[Allocation | None, Place, Span]] = (),
        writes: Sequence[tuple[Allocation | None, Place, Span]] = (),
        after: Sequence[Operation | None] = (),
    ) -> Operation:
        """Queue one operation, and check what it reads and writes."""
        self.operations += 1
        operation = Operation(name, caller(), stream.id, self.operations, run)
        operation.after += [other for other in after if other is not None and not other.done]
        self.checker.issue(stream.id, operation.number)
        unordered: list[int] = []
        for accesses, writing in ((reads, False), (writes, True)):
            for allocation, _, span in accesses:
                if allocation is not None:
                    access = Access(
                        name, operation.line, stream.id, operation.number, writing, span
                    )
                    unordered += self.checker.access(allocation, access)
        self.queue.put(operation, unordered)
        return operation

    def finish(self, operation: Operation | None, clock: Clock) -> None:
        """Let the host wait for an operation; what it issues later comes after it."""
        if operation is not None:
            self.queue.force([operation])
        join(self.checker.host, clock)

    def retain(self, tensor: Tensor, stream: Stream) -> None:
        with torch._C._DisableTorchDispatch():
            allocation, _, _ = self.memory.find(tensor)
        if allocation is not None:
            allocation.recorded.add(stream.id)

    def synchronize(self) -> None:
        """As ``torch.cuda.synchronize``: the host waits for all streams."""
        self.counts["synchronize"] += 1
        self.drain()

    def drain(self) -> None:
        self.queue.force_all()
        for clock in self.checker.clocks.values():
            join(self.checker.host, clock)

    def close(self) -> None:
        """Forget everything but the reports and counts: a stream that lives on keeps the device."""
        self.memory.close()
        self.queue.last.clear()
        self.queue.streams.clear()
        self.queue.waiting.clear()
        self.handles.clear()
        self.last_collective = None


_active: list[Device] = []


def active() -> Device:
    """The device in use. Raises RuntimeError outside ``virtual_streams``."""
    if not _active:
        raise RuntimeError("there are no virtual streams: use this inside `with virtual_streams()`")
    return _active[-1]


class Stream:
    """As ``torch.cuda.Stream``: a first-in-first-out queue of work.

    Arguments are accepted for CUDA's sake and have no effect. Raises RuntimeError outside
    ``virtual_streams``.
    """

    def __init__(self, *_: object, device: Device | object = None, **__: object) -> None:
        self.device = device if isinstance(device, Device) else active()
        self.id = self.device.streams
        self.device.streams += 1

    def __repr__(self) -> str:
        return f"<virtual stream {self.id}>"

    def wait_event(self, event: Event) -> None:
        """Later work of this stream waits for the event as it is recorded now."""
        self.device.counts["wait_event"] += 1
        self.follow(event)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream waits for all that the other one has now."""
        self.device.counts["wait_stream"] += 1
        self.follow(stream.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all that this stream has now."""
        self.device.counts["synchronize"] += 1
        self.finish()

    # What the methods above do, for this package: not counted.

    def follow(self, event: Event) -> None:
        if event.recorded:
            join(self.device.checker.clock(self.id), event.clock)
            self.device.issue("wait", self, after=[event.operation])

    def mark(self) -> Event:
        event = Event()
        event.mark(self)
        return event

    def finish(self) -> None:
        self.device.finish(self.device.queue.last.get(self.id), self.device.checker.clock(self.id))

    def query(self) -> bool:
        """Whether all work of this stream has run. Asking lets one operation run."""
        return _query(
            self.device, self.device.queue.last.get(self.id), self.device.checker.clock(self.id)
        )


class Event:
    """As ``torch.cuda.Event``: a point in a stream. Never recorded, it waits for nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recorded = False
        self.operation: Operation | None = None
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark where the stream, by default the current one, is now."""
        active().counts["record"] += 1
        self.mark(stream or active().current)

    def mark(self, stream: Stream) -> None:
        self.recorded = True
        self.operation = stream.device.queue.last.get(stream.id)
        self.clock = dict(stream.device.checker.clock(stream.id))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active().current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the work before the event."""
        active().counts["synchronize"] += 1
        active().finish(self.operation, self.clock)

    def query(self) -> bool:
        """Whether the work before the event has run. Asking lets one operation run."""
        return _query(active(), self.operation, self.clock)

    def elapsed_time(self, end: Event) -> float:
        """0.0: virtual work takes no time."""
        return 0.0


def _query(device: Device, operation: Operation | None, clock: Clock) -> bool:
    if operation is None or operation.done:
        join(device.checker.host, clock)
        return True
    # A program that asks until the answer is yes must come to an end.
    first = operation
    while pending := [other for other in first.after if not other.done]:
        first = pending[0]
    device.queue.force([first])
    return False


def current_stream(*_: object) -> Stream:
    return active().current


def default_stream(*_: object) -> Stream:
    return active().default


def synchronize(*_: object) -> None:
    """The host waits for all streams."""
    active().synchronize()


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Work issued inside goes to this stream; None changes nothing."""
    device = active()
    before = device.current
    device.current = stream or before
    try:
        yield
    finally:
        device.current = before


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """As ``Tensor.record_stream``: when the tensor's memory is freed, keep it from being used again
    until all work that this stream has then is done. No effect on memory from before the context.
    """
    device = active()
    device.counts["record_stream"] += 1
    device.retain(tensor, stream)
