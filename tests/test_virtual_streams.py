"""CPU tensors under virtual streams behave as CUDA tensors under CUDA streams."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerofix.testing import (
    Event,
    Race,
    Schedule,
    Stream,
    UnsafeFree,
    current_stream,
    default_stream,
    place_gradients,
    stream,
    synchronize,
    virtual_streams,
)

SCHEDULES: list[Schedule] = ["lazy", "in-order", 0, 1, 2]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@schedules
def test_ordered_streams_give_the_right_numbers_and_no_report(schedule: Schedule) -> None:
    with virtual_streams(schedule) as device:
        a = torch.arange(4.0)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            b = a * 2
        current_stream().wait_stream(side)
        assert (b + 1).tolist() == [1, 3, 5, 7]
    assert device.reports == []


def test_a_missing_wait_is_a_wrong_number_and_is_named() -> None:
    with virtual_streams() as device:
        a = torch.zeros(4)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            a.add_(1)
        assert a.clone().tolist() == [0, 0, 0, 0]
    (race,) = device.reports
    assert isinstance(race, Race)
    assert (race.first.stream, race.second.stream) == (side.id, 0)
    assert "add_" in race.first.operation
    assert race.first.writes
    assert "clone" in race.second.operation
    assert not race.second.writes
    for access in (race.first, race.second):
        assert access.line.file == __file__
        assert access.line.function == "test_a_missing_wait_is_a_wrong_number_and_is_named"


def test_a_write_after_read_hazard_is_a_wrong_number() -> None:
    with virtual_streams() as device:
        a = torch.ones(4)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            b = a * 2
        a.fill_(5)
        side.synchronize()
        assert b.tolist() == [10, 10, 10, 10]
    assert [type(report) for report in device.reports] == [Race]


def test_disjoint_bytes_do_not_race() -> None:
    with virtual_streams() as device:
        a = torch.zeros(4, 4)
        sides = [Stream(), Stream()]
        for column, side in enumerate(sides):
            side.wait_stream(current_stream())
            with stream(side):
                a[:, column] = column + 1
        for side in sides:
            current_stream().wait_stream(side)
        assert a[0].tolist() == [1, 2, 0, 0]
    assert device.reports == []


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_goes_to_the_next_allocation_unless_recorded(recorded: bool) -> None:
    with virtual_streams() as device:
        a = torch.ones(4)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            b = a * 2
        if recorded:
            a.record_stream(side)
        del a
        torch.full((4,), 7.0)
        synchronize()
        assert b.tolist() == ([2] * 4 if recorded else [14] * 4)
    assert [type(report) for report in device.reports] == [] if recorded else [UnsafeFree]


def test_an_unsafe_free_names_where_memory_was_allocated_used_freed_and_taken() -> None:
    with virtual_streams() as device:
        a = torch.ones(4)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            _ = a * 2
        del a
        torch.ones(4)
    (report,) = device.reports
    assert isinstance(report, UnsafeFree)
    assert report.access.stream == side.id
    lines = [report.allocated, report.access.line, report.freed, report.reused]
    start = test_an_unsafe_free_names_where_memory_was_allocated_used_freed_and_taken
    first = start.__code__.co_firstlineno
    assert [line.number - first for line in lines] == [2, 6, 7, 8]


def test_a_free_is_safe_when_its_stream_waits_before_it_allocates_again() -> None:
    with virtual_streams() as device:
        a = torch.ones(4)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            b = a * 2
        del a
        current_stream().wait_stream(side)
        torch.full((4,), 7.0)
        assert b.tolist() == [2] * 4
    assert device.reports == []


def test_events_mark_a_point_and_not_the_stream() -> None:
    with virtual_streams() as device:
        side, event = Stream(), Event()
        current_stream().wait_event(event)  # never recorded: no effect
        a, b = torch.zeros(1), torch.zeros(1)
        side.wait_stream(current_stream())
        with stream(side):
            a.add_(1)
            event.record()
            b.add_(1)
        event.wait()
        assert a.item() == 1
        assert b.item() == 0
    (race,) = device.reports
    assert isinstance(race, Race)
    assert device.counts == {"wait_event": 2, "wait_stream": 1, "record": 1}


def test_lazy_work_waits_until_somebody_needs_it_and_a_query_does_not_hang() -> None:
    with virtual_streams():
        side, event = Stream(), Event()
        with stream(side):
            a = torch.ones(3)
            a.add_(1)
            event.record()
        assert not event.query()
        while not event.query():
            pass
        assert side.query()
        assert a.tolist() == [2, 2, 2]


class Synchronizes:
    """Garbage that waits for the device when it is collected, as DeepSpeed's engine does."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        synchronize()


def test_garbage_collected_while_an_operation_runs_does_not_run_what_comes_after_it() -> None:
    library = torch.library.Library("zerofix_tests", "FRAGMENT")
    library.define("copy(Tensor source, Tensor(a!) destination) -> ()")

    def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        Synchronizes()
        assert len([[] for _ in range(100_000)]) == 100_000  # enough for a collection
        destination.copy_(source)

    library.impl("copy", copy, "CompositeExplicitAutograd")
    with virtual_streams():
        destination = torch.zeros(2)
        torch.ops.zerofix_tests.copy(torch.ones(2), destination)
        assert (destination + 1).tolist() == [2.0, 2.0]
        gc.collect()


def test_reading_on_the_host_waits_for_the_current_stream_only() -> None:
    with virtual_streams():
        a = torch.zeros(3)
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            a.add_(1)
        assert a.sum().item() == 0
        assert a.numpy().tolist() == [0, 0, 0]
        assert a.nonzero().numel() == 0
        side.synchronize()
        assert bool((a == 1).all())


@schedules
def test_training_is_the_eager_one_bit_for_bit(schedule: Schedule) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 8),
            torch.nn.LayerNorm(8),
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 10),
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            tokens = torch.randint(10, (4, 6))
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = train()
    with virtual_streams(schedule) as device:
        found = train()
    assert device.reports == []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("waits", [True, False])
def test_hooks_run_on_the_stream_that_their_gradient_was_placed_on(waits: bool) -> None:
    with virtual_streams() as device:
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        seen: list[Stream] = []
        total = torch.zeros(2)

        def hook(weight: torch.Tensor) -> None:
            seen.append(current_stream())
            if waits and len(seen) > 1:
                current_stream().wait_stream(seen[-2])
            total.add_(weight.grad)

        for weight in weights:
            weight.register_post_accumulate_grad_hook(hook)
        streams = [Stream(), Stream()]
        with place_gradients(dict(zip(weights, streams, strict=True))):
            (weights[0] * 2 + weights[1] * 3).sum().backward()
        assert current_stream() is default_stream()
        assert {s.id for s in seen} == {s.id for s in streams}
        # backward() itself leaves no work that the caller would have to wait for.
        assert [weight.grad.tolist() for weight in weights] == [[2, 2], [3, 3]]
        assert total.tolist() == [5, 5] or not waits
    assert bool(device.reports) is not waits


def test_everything_is_put_back_at_the_end() -> None:
    methods = torch.Tensor.record_stream, torch.Tensor.tolist, torch.Tensor.numpy
    with virtual_streams():
        a = torch.ones(2) + 1
        with pytest.raises(RuntimeError, match="do not nest"), virtual_streams():
            pass
    assert (torch.Tensor.record_stream, torch.Tensor.tolist, torch.Tensor.numpy) == methods
    assert a.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="no virtual streams"):
        Stream()
    with pytest.raises(ValueError, match="'soon'"), virtual_streams("soon"):  # type: ignore[arg-type]
        pass


def test_an_error_of_a_call_is_raised_at_the_call() -> None:
    with virtual_streams(), pytest.raises(RuntimeError, match="size"):
        torch.ones(2).add_(torch.ones(3))


# Random programs. Each step works on slices of a few shared buffers, on one of a few streams.

BUFFERS, LENGTH, STREAMS = 2, 8, 3


@dataclass(frozen=True)
class Step:
    """``buffer[start:stop] = buffer[start:stop] * 2 + other[start:stop] + 7**number``.

    Exact in fp64, and no two orders of conflicting steps give the same sums.
    """

    stream: int
    target: int
    source: int
    start: int
    stop: int

    def run(self, buffers: list[torch.Tensor], number: int) -> None:
        target = buffers[self.target][self.start : self.stop]
        target.copy_(target * 2 + buffers[self.source][self.start : self.stop] + 7.0**number)

    def conflicts(self, other: Step) -> bool:
        """Whether the two touch the same bytes and one of them writes them."""
        apart = self.stop <= other.start or other.stop <= self.start
        return not apart and (
            self.target in (other.target, other.source) or other.target == self.source
        )


steps = st.builds(
    lambda stream, target, source, start, length: Step(
        stream, target, source, start, min(LENGTH, start + length)
    ),
    st.integers(0, STREAMS - 1),
    st.integers(0, BUFFERS - 1),
    st.integers(0, BUFFERS - 1),
    st.integers(0, LENGTH - 1),
    st.integers(1, LENGTH),
)
programs = st.lists(steps, min_size=1, max_size=10)


def sequential(program: list[Step]) -> list[list[float]]:
    buffers = [torch.full((LENGTH,), float(i), dtype=torch.float64) for i in range(BUFFERS)]
    for number, step in enumerate(program):
        step.run(buffers, number)
    return [buffer.tolist() for buffer in buffers]


def concurrent(
    program: list[Step], schedule: Schedule, without: tuple[int, int] | None = None
) -> tuple[list[list[float]], list[object]]:
    """The program on its streams. Each step waits for the events of the earlier steps on other
    streams it conflicts with, except one: ``without`` is (step, earlier step)."""
    with virtual_streams(schedule) as device:
        buffers = [torch.full((LENGTH,), float(i), dtype=torch.float64) for i in range(BUFFERS)]
        streams = [Stream() for _ in range(STREAMS)]
        for side in streams:
            side.wait_stream(current_stream())
        events: list[Event] = []
        for number, step in enumerate(program):
            for earlier, event in enumerate(events):
                other = program[earlier]
                needed = step.conflicts(other) and step.stream != other.stream
                if needed and (number, earlier) != without:
                    streams[step.stream].wait_event(event)
            with stream(streams[step.stream]):
                step.run(buffers, number)
            events.append(streams[step.stream].record_event())
        synchronize()
        result = [buffer.tolist() for buffer in buffers]
    return result, list(device.reports)


def reaches(program: list[Step], number: int, earlier: int) -> bool:
    """Whether ``number`` comes after ``earlier`` without the wait between the two."""
    frontier, seen = [number], set()
    while frontier:
        step = frontier.pop()
        for other in range(step):
            linked = program[other].stream == program[step].stream or program[step].conflicts(
                program[other]
            )
            if linked and (step, other) != (number, earlier) and other not in seen:
                seen.add(other)
                frontier.append(other)
    return earlier in seen


@settings(max_examples=60, deadline=None)
@given(programs, st.sampled_from(["lazy", *range(20)]))
def test_synchronised_programs_are_sequential_and_silent(
    program: list[Step], schedule: Schedule
) -> None:
    result, reports = concurrent(program, schedule)
    assert reports == []
    assert result == sequential(program)


@settings(max_examples=60, deadline=None)
@given(programs, st.data())
def test_a_needed_wait_that_is_dropped_is_reported_and_gives_wrong_numbers(
    program: list[Step], data: st.DataObject
) -> None:
    needed = [
        (number, earlier)
        for number in range(len(program))
        for earlier in range(number)
        if program[number].conflicts(program[earlier])
        and program[number].stream != program[earlier].stream
        and not reaches(program, number, earlier)
    ]
    assume(needed)
    dropped = data.draw(st.sampled_from(needed))
    result, reports = concurrent(program, "lazy", without=dropped)
    assert any(isinstance(report, Race) for report in reports)
    assert result != sequential(program)


def test_recorded_memory_waits_for_all_that_the_recorded_stream_waited_for() -> None:
    """As a gradient that NCCL's stream reduces and the reduction stream, recorded, waits for."""
    with virtual_streams("in-order") as device:
        a = torch.ones(4)
        recorded, other = Stream(), Stream()
        other.wait_stream(current_stream())
        with stream(other):
            a.mul_(2)
        recorded.wait_stream(other)
        a.record_stream(recorded)
        del a
        torch.ones(4)
    assert device.reports == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), min_size=2, max_size=12))
def test_recorded_memory_is_never_reused_too_early(uses: list[tuple[int, int]]) -> None:
    """Temporaries of the default stream, each read on a side stream and dropped."""

    def run(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        sides = [Stream() for _ in range(3)]
        results = []
        for number, (side, length) in enumerate(uses):
            temporary = make(length).fill_(number)
            sides[side].wait_stream(current_stream())
            with stream(sides[side]):
                results.append(temporary + 1)
            temporary.record_stream(sides[side])
            del temporary
        synchronize()
        return results

    gc.disable()
    try:
        with virtual_streams() as device:
            results = run(torch.empty)
    finally:
        gc.enable()
    assert device.reports == []
    for number, (result, (_, length)) in enumerate(zip(results, uses, strict=True)):
        assert torch.equal(result, torch.full((length,), number + 1.0))


def test_the_example_of_the_documentation_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "virtual-streams.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})
    comments = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == [
        "[2.0, 2.0, 2.0, 2.0]",
        *comments,
    ]
