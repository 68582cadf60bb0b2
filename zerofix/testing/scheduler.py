"""In which order queued operations run: always one that the declared ordering allows."""

from __future__ import annotations

import gc
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from zerofix.testing.lines import Line

Schedule = Literal["lazy", "in-order"] | int
"""``"lazy"``: every operation as late as the declared ordering allows. ``"in-order"``: at once, as
on a CPU. A number: a legal order drawn at random with this seed."""


@dataclass(eq=False, slots=True)
class Operation:
    """One queued piece of work; it may run when everything in ``after`` has."""

    name: str
    line: Line
    stream: int
    number: int
    """Counts operations in the order of their issue, over all streams."""
    run: Callable[[], None] | None
    after: list[Operation] = field(default_factory=list)
    """Its predecessor in the stream, and what the stream was told to wait for."""
    done: bool = False


class Policy:
    """What a schedule decides. This one is ``"lazy"``."""

    adverse = True
    """Whether of two unordered operations that race the one issued first should run last."""

    def last(self, ready: list[tuple[int, Operation]]) -> Operation:
        """Take out of a heap of operations the one that runs after all others."""
        return heapq.heappop(ready)[1]

    def early(self) -> bool:
        """Whether to run one more operation that nobody waits for yet."""
        return False

    def next(self, heads: list[Operation]) -> Operation:
        return heads[0]


class InOrder(Policy):
    adverse = False

    def early(self) -> bool:
        return True


class Seeded(Policy):
    adverse = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def last(self, ready: list[tuple[int, Operation]]) -> Operation:
        chosen = ready.pop(self.random.randrange(len(ready)))[1]
        heapq.heapify(ready)
        return chosen

    def early(self) -> bool:
        return self.random.random() < 0.4

    def next(self, heads: list[Operation]) -> Operation:
        return self.random.choice(heads)


def policy(schedule: Schedule) -> Policy:
    """Raises ValueError for a schedule that does not exist."""
    if schedule == "lazy":
        return Policy()
    if schedule == "in-order":
        return InOrder()
    if isinstance(schedule, int):
        return Seeded(schedule)
    raise ValueError(f"schedule must be 'lazy', 'in-order' or a seed, not {schedule!r}")


class Queue:
    """Operations that were issued and did not run yet, one first-in-first-out queue a stream."""

    def __init__(self, schedule: Schedule) -> None:
        self.policy = policy(schedule)
        self.streams: dict[int, deque[Operation]] = {}
        self.last: dict[int, Operation] = {}
        self.waiting: dict[int, Operation] = {}
        """By number: what did not run yet."""

    def put(self, operation: Operation, unordered: Iterable[int] = ()) -> None:
        """Queue an operation that races with those of the given numbers, issued before it."""
        previous = self.last.get(operation.stream)
        if previous is not None and not previous.done:
            operation.after.append(previous)
        self.last[operation.stream] = operation
        self.waiting[operation.number] = operation
        self.streams.setdefault(operation.stream, deque()).append(operation)
        if self.policy.adverse:
            for number in set(unordered) & self.waiting.keys():
                # Legal unless what was put off before has closed a circle.
                if number not in self.closure([operation]):
                    self.waiting[number].after.append(operation)
        while self.policy.early() and (heads := self.heads()):
            self.execute(self.policy.next(heads))

    def heads(self) -> list[Operation]:
        """The operations that may run now, in the order of their streams' creation."""
        heads = []
        for waiting in self.streams.values():
            while waiting and waiting[0].done:
                waiting.popleft()
            if (
                waiting
                and waiting[0].number in self.waiting
                and all(other.done for other in waiting[0].after)
            ):
                heads.append(waiting[0])
        return heads

    def closure(self, wanted: Iterable[Operation]) -> dict[int, Operation]:
        """These and, by number, what is ordered before them, as far as it did not run yet."""
        needed: dict[int, Operation] = {}
        stack = [operation for operation in wanted if not operation.done]
        while stack:
            operation = stack.pop()
            if operation.number not in needed:
                needed[operation.number] = operation
                stack += [other for other in operation.after if not other.done]
        return needed

    def force(self, wanted: Iterable[Operation]) -> None:
        """Run these, and before them what the declared ordering puts before them: no more."""
        for operation in self.arrange(self.closure(wanted)):
            self.execute(operation)

    def force_all(self) -> None:
        self.force(list(self.last.values()))

    def arrange(self, needed: dict[int, Operation]) -> list[Operation]:
        """A legal order of these, made from its end: the policy says what comes last."""
        followers = dict.fromkeys(needed, 0)
        for operation in needed.values():
            for other in operation.after:
                if not other.done:
                    followers[other.number] += 1
        ready = [(number, needed[number]) for number, count in followers.items() if count == 0]
        heapq.heapify(ready)
        backwards = []
        while ready:
            operation = self.policy.last(ready)
            backwards.append(operation)
            for other in operation.after:
                if not other.done:
                    followers[other.number] -= 1
                    if followers[other.number] == 0:
                        heapq.heappush(ready, (other.number, other))
        return backwards[::-1]

    def execute(self, operation: Operation) -> None:
        # Finalizers issue operations and wait: DeepSpeed's engine synchronizes when it is
        # collected. Between two operations that may have run this one. In the middle of one,
        # those that come after it would run before it is done.
        if self.waiting.pop(operation.number, None) is None:
            return
        if operation.run is not None:
            collecting = gc.isenabled()
            gc.disable()
            try:
                operation.run()
            except Exception as error:
                message = f"{operation.name}, issued at {operation.line}: {error}"
                raise RuntimeError(message) from error
            finally:
                if collecting:
                    gc.enable()
        operation.done = True
        operation.run = None
        operation.after = []
