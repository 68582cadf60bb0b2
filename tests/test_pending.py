"""Pending copies: when they are made, what they keep alive, and what others see meanwhile."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerofix.kernels.pending import BOUND, Pending, is_watched


class Streams:
    """Which stream is current, and on which one copies were reported."""

    def __init__(self, pending_bound=BOUND):
        self.current = "main"
        self.copied = []
        self.pending = Pending(self.on, self.report, pending_bound)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def report(self, stream):
        assert self.current == stream
        self.copied.append(stream)


def add(streams, stream, source, destination, **options):
    with streams.on(stream):
        streams.pending.add(stream, source, destination, **options)


def test_copies_wait_for_a_flush_and_are_made_once():
    streams = Streams()
    bucket, source = torch.zeros(4), torch.ones(2)
    add(streams, "a", source, bucket[:2])
    add(streams, "a", source * 2, bucket[2:])
    assert len(streams.pending) == 2
    assert not bucket.any()
    streams.pending.flush()
    assert bucket.tolist() == [1, 1, 2, 2]
    assert (len(streams.pending), streams.copied) == (0, ["a"])
    bucket.zero_()
    streams.pending.flush()
    assert not bucket.any()
    assert streams.copied == ["a"]


def test_another_stream_flushes_on_the_stream_of_what_is_pending():
    streams = Streams()
    bucket = torch.zeros(2)
    add(streams, "a", torch.ones(1), bucket[:1])
    add(streams, "b", torch.ones(1), bucket[1:])
    assert streams.copied == ["a"]
    assert bucket.tolist() == [1, 0]
    streams.pending.flush()
    assert streams.copied == ["a", "b"]
    assert bucket.tolist() == [1, 1]


def test_what_may_not_wait_takes_along_what_does():
    streams = Streams()
    bucket = torch.zeros(2)
    add(streams, "a", torch.ones(1), bucket[:1])
    add(streams, "a", torch.ones(1), bucket[1:], now=True)
    assert streams.copied == ["a"]
    assert bucket.tolist() == [1, 1]


def test_copies_wait_again_after_the_bound_was_passed():
    streams = Streams(pending_bound=8)
    bucket = torch.zeros(4)
    waiting = []
    for i in range(4):
        add(streams, "a", torch.ones(1), bucket[i : i + 1])
        waiting.append(len(streams.pending))
    assert waiting == [1, 0, 1, 0]


@pytest.mark.parametrize("before", [0, 1], ids=["alone", "with-another"])
def test_a_failed_copy_is_not_tried_again(before):
    streams = Streams()
    for _ in range(before):
        add(streams, "a", torch.ones(3), torch.zeros(3))
    add(streams, "a", torch.ones(1), torch.zeros(2))
    with pytest.raises((ValueError, RuntimeError)):
        streams.pending.flush()
    assert len(streams.pending) == 0
    streams.pending.flush()


@pytest.mark.parametrize("count", [1, 2])
def test_a_source_may_have_any_shape_and_layout_and_belong_to_a_graph(count):
    streams = Streams()
    sources = [torch.randn(3, 4, requires_grad=True).t() * (i + 1) for i in range(count)]
    bucket = torch.zeros(count, 12, dtype=torch.bfloat16)
    for source, destination in zip(sources, bucket, strict=True):
        add(streams, "a", source, destination)
    streams.pending.flush()
    for source, destination in zip(sources, bucket, strict=True):
        assert torch.equal(destination, source.detach().flatten().bfloat16())
    assert not bucket.requires_grad


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 100).map(lambda elements: 4 * elements),
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from("aab")), max_size=30
    ),
)
def test_gradients_kept_alive_stay_below_the_bound(bound, drawn):
    """A source may be a view of more memory than it reads, which lives as long as it does."""
    streams = Streams(bound)
    total = sum(size for size, _, _ in drawn)
    bucket, expected, start = torch.zeros(total), torch.zeros(total), 0
    alive = []
    for i, (size, more, stream) in enumerate(drawn):
        storage = torch.full((size + more,), float(i + 1))
        alive.append((StorageWeakRef(storage.untyped_storage()), 4 * len(storage)))
        add(streams, stream, storage[:size], bucket[start : start + size])
        expected[start : start + size] = i + 1
        start += size
        del storage
        kept = sum(size for storage, size in alive if not storage.expired())
        assert kept < bound
    streams.pending.flush()
    assert torch.equal(bucket, expected)
    assert all(storage.expired() for storage, _ in alive)


class Bucketed:
    """A model whose gradients go to a bucket from hooks, as ZeRO-1 and 2 do it."""

    def __init__(self, *, late=True, watch=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.x = torch.randn(4, 3)
        self.parameters = list(self.model.parameters())
        size = sum(parameter.numel() for parameter in self.parameters)
        # Who reads the bucket too early reads NaN.
        self.bucket, self.filled = torch.full((size,), float("nan")), 0
        self.pending = Streams().pending
        self.late, self.watch = late, watch
        self.expected = torch.autograd.grad(self.loss(), self.parameters)

    def loss(self):
        return self.model(self.x).pow(2).sum()

    def hook(self):
        """As deepspeed.initialize does: after some hooks of a user's, before others."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.fill)

    def fill(self, parameter):
        size = parameter.numel()
        slice_ = self.bucket.narrow(0, self.filled, size)
        gradient = parameter.grad
        now = self.watch and is_watched(parameter)
        late = gradient if self.late else None
        self.pending.add("main", gradient.view(-1), slice_, late, now=now)
        if not self.late:
            gradient.data = slice_.view_as(gradient)
        self.filled += size

    def backward(self):
        self.loss().backward()
        self.pending.flush()


def same(got, expected):
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def test_gradients_end_as_views_of_the_bucket():
    bucketed = Bucketed()
    bucketed.hook()
    bucketed.backward()
    assert same([parameter.grad for parameter in bucketed.parameters], bucketed.expected)
    storages = {p.grad.untyped_storage().data_ptr() for p in bucketed.parameters}
    assert storages == {bucketed.bucket.untyped_storage().data_ptr()}
    assert bucketed.bucket.isfinite().all()


@pytest.mark.parametrize("first", [True, False], ids=["before-ours", "after-ours"])
def test_a_gradient_that_a_users_hook_may_look_at_is_never_left_pending(first):
    """The user's hook keeps what it sees, to read the reduced gradient from it after backward."""
    bucketed = Bucketed()
    watched, waiting, seen = bucketed.parameters[2], [], []

    def users(parameter):
        seen.append(parameter.grad.detach() if not first else parameter.grad)
        waiting.append(len(bucketed.pending))

    if first:
        watched.register_post_accumulate_grad_hook(users)
    bucketed.hook()
    if not first:
        watched.register_post_accumulate_grad_hook(users)
    assert [is_watched(parameter) for parameter in bucketed.parameters] == [
        False,
        False,
        True,
        False,
    ]
    bucketed.loss().backward()
    place = bucketed.bucket.untyped_storage().data_ptr()
    assert watched.grad.untyped_storage().data_ptr() == place
    assert len(bucketed.pending) > 0  # the others wait
    if not first:
        assert waiting == [0]
    bucketed.pending.flush()
    bucketed.bucket.mul_(0.5)  # the reduction
    assert same(seen, [bucketed.expected[2] * 0.5])


def test_register_hook_runs_before_the_gradient_is_there_and_does_not_count():
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    grads = []
    parameter.register_hook(lambda _: grads.append(parameter.grad))
    assert not is_watched(parameter)
    parameter.sum().backward()
    assert grads == [None]


def test_a_hook_that_was_removed_does_not_watch():
    parameter = nn.Parameter(torch.ones(2))
    assert not is_watched(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert is_watched(parameter)
    handle.remove()
    assert not is_watched(parameter)


def on_the_node(bucketed, look):
    """A hook of the AccumulateGrad node, that runs after the gradient's hooks."""
    parameter = bucketed.parameters[2]
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: look([2]))
    return node


def on_a_tensor(bucketed, look):
    """A hook of an activation, below the layer whose gradients it reads."""

    def forward(module, inputs, output):
        output.register_hook(lambda _: look([3]))

    return bucketed.model[1].register_forward_hook(forward)


def on_a_module(bucketed, look):
    return bucketed.model[0].register_full_backward_hook(lambda *_: look([2, 3]))


@pytest.mark.parametrize("place", [on_the_node, on_a_tensor, on_a_module])
@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_who_cannot_be_found_reads_the_gradient_from_its_own_memory(place, late):
    """Exchanged when it is added, and not when it is copied, the gradient would be read as NaN."""
    bucketed = Bucketed(late=late)
    bucketed.x.requires_grad_()
    seen = {}

    def look(indices):
        for i in indices:
            gradient = bucketed.parameters[i].grad
            if gradient is not None:
                seen[i] = gradient.clone()

    keep = place(bucketed, look)
    bucketed.hook()
    bucketed.backward()
    assert keep is not None
    assert seen
    right = same(list(seen.values()), [bucketed.expected[i] for i in seen])
    assert right is late
    assert same([parameter.grad for parameter in bucketed.parameters], bucketed.expected)


def test_what_a_hidden_hook_changes_is_what_is_copied():
    bucketed = Bucketed()

    def triple(_):
        bucketed.parameters[2].grad.mul_(3)

    node = on_the_node(bucketed, triple)
    bucketed.hook()
    bucketed.backward()
    assert node is not None
    expected = [g * 3 if i == 2 else g for i, g in enumerate(bucketed.expected)]
    assert same([parameter.grad for parameter in bucketed.parameters], expected)
    total = sum(gradient.sum() for gradient in expected)
    torch.testing.assert_close(bucketed.bucket.sum(), total)
