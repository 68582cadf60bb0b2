"""In which order queued operations run: always one that the declared ordering allows."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

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


class Policy(Protocol):
    """What a schedule decides."""

    def choose(self, ready: list[tuple[int, Operation]]) -> Operation:
        """Take out of a heap of operations the one that runs after all others."""

    def eager(self) -> bool:
        """Whether to run one more operation that nobody waits for yet."""

    def pick(self, heads: list[Operation]) -> Operation: ...


class Lazy:
    def choose(self, ready: list[tuple[int, Operation]]) -> Operation:
        return heapq.heappop(ready)[1]

    def eager(self) -> bool:
        return False

    def pick(self, heads: list[Operation]) -> Operation:
        return heads[0]


class InOrder(Lazy):
    def eager(self) -> bool:
        return True


class Seeded:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, ready: list[tuple[int, Operation]]) -> Operation:
        chosen = ready.pop(self.random.randrange(len(ready)))[1]
        heapq.heapify(ready)
        return chosen

    def eager(self) -> bool:
        return self.random.random() < 0.4

    def pick(self, heads: list[Operation]) -> Operation:
        return self.random.choice(heads)


def policy(schedule: Schedule) -> Policy:
    """Raises ValueError for a schedule that does not exist."""
    if schedule == "lazy":
        return Lazy()
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
        self.running = False

    def put(self, operation: Operation) -> None:
        previous = self.last.get(operation.stream)
        if previous is not None and not previous.done:
            operation.after.append(previous)
        self.last[operation.stream] = operation
        self.streams.setdefault(operation.stream, deque()).append(operation)
        while self.policy.eager() and (heads := self.heads()):
            self.execute(self.policy.pick(heads))

    def heads(self) -> list[Operation]:
        """The operations that may run now, in the order of their streams' creation."""
        heads = []
        for waiting in self.streams.values():
            while waiting and waiting[0].done:
                waiting.popleft()
            if waiting and all(other.done for other in waiting[0].after):
                heads.append(waiting[0])
        return heads

    def force(self, wanted: Iterable[Operation]) -> None:
        """Run these, and before them what the declared ordering puts before them: no more."""
        needed: dict[int, Operation] = {}
        stack = [operation for operation in wanted if not operation.done]
        while stack:
            operation = stack.pop()
            if operation.number not in needed:
                needed[operation.number] = operation
                stack += [other for other in operation.after if not other.done]
        for operation in self.arrange(needed):
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
            operation = self.policy.choose(ready)
            backwards.append(operation)
            for other in operation.after:
                if not other.done:
                    followers[other.number] -= 1
                    if followers[other.number] == 0:
                        heapq.heappush(ready, (other.number, other))
        return backwards[::-1]

    def execute(self, operation: Operation) -> None:
        if operation.run is not None:
            self.running = True
            try:
                operation.run()
            except Exception as error:
                error.add_note(f"in {operation.name}, issued at {operation.line}")
                raise
            finally:
                self.running = False
        operation.done = True
        operation.run = None
        operation.after = []
