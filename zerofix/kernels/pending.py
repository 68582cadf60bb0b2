"""Collects copies of gradients, so that one launch makes many."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zerofix.kernels.pack import pack

BOUND = 16 * 2**20
"""Bytes. A copy of this size keeps an H200 busy for longer than it takes to launch one, so there
is nothing to win beyond it."""


def is_watched(parameter: Tensor) -> bool:
    """Whether another hook than DeepSpeed's may look at the gradient after DeepSpeed's has run.

    True when the parameter has more than one post-accumulate-grad hook: DeepSpeed's is one of
    them. Which runs first does not matter, because a reader may also keep what it has seen. Hooks
    of ``register_hook`` run before the gradient is accumulated and do not count. Hooks on the
    AccumulateGrad node, on other tensors and on modules cannot be found, and ``Pending`` is
    right without knowing them: see there.
    """
    try:
        hooks = parameter._post_accumulate_grad_hooks
    except AttributeError:  # another torch: what cannot be seen may be there
        return True
    return hooks is not None and len(hooks) > 1


class Pending:
    """The copies into buckets that one stream has still to make.

    For gradient hooks: ``add`` instead of ``copy_``. What is pending is copied by one ``pack``, in
    one go, when

    - its gradients keep ``bound`` bytes or more alive,
    - a copy is added on another stream,
    - ``flush`` is called: before anything reads, or waits for, a bucket that copies were added
      for, and before such a bucket is filled anew.

    Until then the gradient keeps its own memory: whoever reads or changes it in between, from a
    hook that nobody knows of or after a backward that ended early, finds what he would find
    without the bucket. Memory: the gradients added keep less than ``bound`` bytes alive when
    ``add`` returns, and inside it those and the one that it is given.

    Args:
        on_stream: gives the context in which a stream is current: ``get_accelerator().stream``.
        copied: called with a stream, and with that stream current, right after copies have been
            launched there: the place to record an event.
        bound: bytes.
    """

    def __init__(
        self,
        on_stream: Callable[[Any], AbstractContextManager[Any]],
        copied: Callable[[Any], None],
        bound: int = BOUND,
    ) -> None:
        self._on_stream = on_stream
        self._copied = copied
        self._bound = bound
        self._stream: Any = None
        self._bytes = 0
        self._sources: list[Tensor] = []
        self._destinations: list[Tensor] = []
        self._gradients: list[Tensor | None] = []

    def __len__(self) -> int:
        return len(self._sources)

    def add(
        self,
        stream: Any,
        source: Tensor,
        destination: Tensor,
        gradient: Tensor | None = None,
        *,
        now: bool = False,
    ) -> None:
        """Have ``source`` copied into ``destination``, on ``stream``, which is current.

        Args:
            stream: compared by ``==``; None where there are no streams.
            source: as for ``pack``. Its memory must stay its own until the copy is launched.
            destination: as for ``pack``. It may overlap one of a pending copy only after a flush.
            gradient: becomes a view of the destination, in its own shape, as soon as the copy is
                launched. ``source`` is usually a view of it.
            now: leave nothing pending: for a parameter that ``is_watched``.
        """
        if self._sources and stream != self._stream:
            self.flush()
        self._stream = stream
        self._sources.append(source)
        self._destinations.append(destination)
        self._gradients.append(gradient)
        # A view keeps all of its storage alive.
        self._bytes += source.untyped_storage().nbytes()
        if now or self._bytes >= self._bound:
            self._launch()

    def flush(self) -> None:
        """Launch what is pending, on its own stream, whichever is current."""
        if self._sources:
            with self._on_stream(self._stream):
                self._launch()

    def _launch(self) -> None:
        sources, destinations, gradients = self._sources, self._destinations, self._gradients
        # Whatever happens, nothing is copied twice, and nothing is kept alive.
        self._sources, self._destinations, self._gradients, self._bytes = [], [], [], 0
        if len(sources) == 1:  # nothing to gather: a plain copy costs the host least
            with torch.no_grad():
                destinations[0].view(sources[0].shape).copy_(sources[0])
        else:
            pack(sources, destinations)
        self._copied(self._stream)
        for destination, gradient in zip(destinations, gradients, strict=True):
            if gradient is not None:
                gradient.data = destination.view_as(gradient)
