"""Which stream wrote a gradient bucket of ZeRO-1/2 and which read it, and the events that say when.

A bucket is written by gradient hooks, on whatever stream autograd runs them, and read by the
reduction. The two functions below go around the two places of DeepSpeed where that happens. They
close

- read after write: the reduction waits for the last copy of every stream, not only for the stream
  it is started from (DeepSpeed #8061);
- write after read: whoever writes a buffer waits for its last reduction.

Waits are on events and not on streams: a reduction does not wait for backward work that came after
the copies. A stream that DeepSpeed itself has ordered is not made to wait again.

Under ``ZEROFIX_BUCKET_COPY=triton`` small gradients wait to be copied many at once (``pending``):
each stream makes its own copies, at the latest before the bucket is reduced.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from zerofix.kernels.pack import triton_may_copy
from zerofix.kernels.pending import BOUND, Pending, is_watched
from zerofix.settings import bucket_copy

Stream = Any
Event = Any
"""Those of the accelerator: ``torch.cuda.Stream``, ``torch.cuda.Event``."""


@dataclass
class Reduction:
    """The last reduction that read a buffer."""

    event: Event
    ordered: set[Stream]
    """Streams that run after it anyhow."""


@dataclass
class Writer:
    """A stream that fills the buckets of a data type."""

    event: Event
    """Recorded right after its last copy, again and again."""
    pending: Pending = field(default_factory=Pending)
    """Copies still to be made."""


@dataclass
class Provenance:
    """Who wrote and read the buckets of one optimizer, by the data type they are reduced in."""

    all: dict[tuple[Any, Stream], Writer] = field(default_factory=dict)
    writers: dict[Any, dict[Stream, Writer]] = field(default_factory=lambda: defaultdict(dict))
    """Those of a bucket since its last reduction."""
    pending: Pending | None = None
    """Where the copy that DeepSpeed makes next is to wait, if it is."""
    # Not under auto: waiting costs the host more than the copy_ that it saves. No GPU has shown
    # yet where that is worth it.
    waits: bool = field(default_factory=lambda: bucket_copy() == "triton")
    """Whether copies may wait at all."""

    def copy_into(self, destination: Tensor, gradient: Tensor) -> Callable[[Tensor], Any]:
        """What DeepSpeed calls, instead of ``destination.copy_``, with the flattened gradient."""
        if self.pending is None:
            return destination.copy_
        return functools.partial(self.pending.add, destination=destination, gradient=gradient)


@dataclass
class Bucket:
    """A bucket as it is now; the names in DeepSpeed changed with 0.17.2."""

    key: Any
    elements: int
    buffer: Any
    """The one that is being filled; None where gradients are not contiguous."""
    waited_for: Collection[Stream]
    """Those that DeepSpeed itself waits for (with ``overlap_comm``, from 0.19.3 on)."""


def wait_for_the_last_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``reduce_independent_p_g_buckets_and_remove_grads``, which fills the buckets."""

    @functools.wraps(original)
    def reduce_independent_p_g_buckets_and_remove_grads(self: Any, param: Any, i: int) -> Any:
        provenance = _provenance(self)
        if not streams_matter(self):
            return original(self, param, i)
        accelerator = get_accelerator()
        stream = accelerator.current_stream()
        key = self.get_param_comm_dtype(param) if hasattr(self, "ipg_buckets") else None
        bucket = _bucket(self, key)
        # A bucket that is full is reduced first. Then the other buffer is written, and DeepSpeed
        # has let this stream wait for all reductions before that one; or the same, by the same
        # stream.
        if bucket.elements + param.numel() <= self.reduce_bucket_size:
            last = _last_reduction(bucket.buffer)
            if last and stream not in last.ordered:
                stream.wait_event(last.event)
                last.ordered.add(stream)
        writer = provenance.all.get((key, stream))
        if writer is None:
            writer = provenance.all[key, stream] = Writer(accelerator.Event())
        pending = provenance.pending = writer.pending if _may_wait(self, param, bucket) else None
        result = original(self, param, i)
        if pending is not None:
            pending.give_back()
            if pending.bytes >= BOUND:
                pending.launch()
        if not writer.pending:
            writer.event.record(stream)
        provenance.writers[key][stream] = writer
        return result

    return reduce_independent_p_g_buckets_and_remove_grads


def wait_for_all_writers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``reduce_ipg_grads``, which reduces the buckets and empties them."""

    @functools.wraps(original)
    def reduce_ipg_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not streams_matter(self):
            return original(self, *args, **kwargs)
        accelerator = get_accelerator()
        current = accelerator.current_stream()
        stream = self.reduction_stream if self.overlap_comm else current
        writers = _provenance(self).writers
        full = [bucket for bucket in _buckets(self) if bucket.elements]
        for bucket in full:
            # What is in no buffer is touched by the current stream first, and DeepSpeed lets the
            # reduction wait for that.
            reader = stream if _is_buffered(self, bucket) else current
            for producer, writer in writers.get(bucket.key, {}).items():
                # At its end, autograd has let the stream that called backward wait for all others.
                joined = not _in_backward()
                if writer.pending:
                    with accelerator.stream(producer):
                        writer.pending.launch()
                    writer.event.record(producer)
                    joined = False
                if producer != current and producer not in bucket.waited_for and not joined:
                    reader.wait_event(writer.event)
        if self.overlap_comm:
            # DeepSpeed lets the current stream wait for all reductions so far.
            for buffer in _buffers(self):
                if last := _last_reduction(buffer):
                    last.ordered.add(current)
        result = original(self, *args, **kwargs)
        for bucket in full:
            if not _bucket(self, bucket.key).elements:
                writers.pop(bucket.key, None)
                if _is_buffered(self, bucket):
                    event = accelerator.Event()
                    event.record(stream)
                    bucket.buffer.last_reduction = Reduction(event, {stream})
        return result

    return reduce_ipg_grads


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def streams_matter(optimizer: Any) -> bool:
    """Whether the device has streams, and DeepSpeed leaves their order to zerofix."""
    # With offload, DeepSpeed 0.19.8 has events of its own.
    return not (
        get_accelerator().resolves_data_dependency()
        or getattr(optimizer, "_offload_gradient_safety_enabled", False)
    )


def _may_wait(optimizer: Any, param: Tensor, bucket: Bucket) -> bool:
    """Whether the copy of this gradient may wait for others."""
    return (
        optimizer.bucket_provenance.waits
        and bucket.buffer is not None
        and triton_may_copy(bucket.buffer.device)
        and param.nbytes < BOUND
        # Up to 0.16.5 its own hook is on the node.
        and not is_watched(param, own=0 if hasattr(optimizer, "grad_accs") else 1)
        # DeepSpeed goes on adding to this gradient.
        and getattr(param, "ds_grad_is_ready", True)
        # It turns the gradients' dimensions around.
        and not getattr(optimizer, "zenflow", False)
        and not torch.compiler.is_compiling()
    )


def _is_buffered(optimizer: Any, bucket: Bucket) -> bool:
    """Whether the reduction reads the buffer: a gradient larger than it stays where it is."""
    return bucket.buffer is not None and bucket.elements <= optimizer.reduce_bucket_size


def _last_reduction(buffer: Any) -> Reduction | None:
    # At the buffer itself, which DeepSpeed makes anew for each backward.
    last: Reduction | None = getattr(buffer, "last_reduction", None)
    return last


def _bucket(optimizer: Any, key: Any) -> Bucket:
    buffered = optimizer.contiguous_gradients
    if key is None:
        buffer = (
            optimizer.ipg_buffer[optimizer.ipg_index] if buffered and optimizer.ipg_buffer else None
        )
        return Bucket(key, optimizer.elements_in_ipg_bucket, buffer, ())
    bucket = optimizer.ipg_buckets[key]
    buffer = bucket.buffer[bucket.index] if buffered and bucket.buffer else None
    # ZenFlow has an average_tensor of its own, that waits for none of them.
    zenflow = getattr(optimizer, "zenflow", False)
    waited_for = () if zenflow else getattr(bucket, "copy_streams", ())
    return Bucket(key, bucket.elements, buffer, waited_for)


def _buckets(optimizer: Any) -> Iterator[Bucket]:
    for key in getattr(optimizer, "ipg_buckets", [None]):
        yield _bucket(optimizer, key)


def _buffers(optimizer: Any) -> Iterator[Any]:
    if hasattr(optimizer, "ipg_buckets"):
        for bucket in optimizer.ipg_buckets.values():
            yield from bucket.buffer
    elif optimizer.contiguous_gradients:
        yield from optimizer.ipg_buffer or ()


def _provenance(optimizer: Any) -> Provenance:
    found: Provenance | None = vars(optimizer).get("bucket_provenance")
    if found is None:
        optimizer.bucket_provenance = found = Provenance()
    return found
