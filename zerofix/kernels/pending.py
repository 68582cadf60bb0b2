"""Collects copies of gradients into a bucket, so that one launch makes many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofix.kernels.pack import pack

BOUND = 16 * 2**20
"""Bytes of gradients at which the copies are made. At 4 TB/s they are read and written in 8 µs,
about what a launch takes: there is little to win beyond."""


class Pending:
    """The copies into a bucket that one stream has still to make.

    A gradient keeps its own memory until its copy is launched, and becomes a view of the bucket
    then: whoever reads or changes it in between, from a hook that nobody knows of, finds what he
    would find in the bucket, and what he changes is what is copied.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor, Tensor]] = []
        self.bytes = 0
        """Of memory that the waiting gradients keep."""

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, source: Tensor, destination: Tensor, gradient: Tensor) -> None:
        """Have ``source`` copied into ``destination``, of which ``gradient`` becomes a view.

        ``source`` is ``gradient`` of one dimension; both tensors are as for ``pack``.
        """
        self._copies.append((source, destination, gradient))
        # A view keeps all of its storage alive.
        self.bytes += source.untyped_storage().nbytes()

    def give_back(self) -> None:
        """Give the gradient added last its own memory again: DeepSpeed has made it a view of the
        bucket already."""
        if self._copies:
            source, _, gradient = self._copies[-1]
            gradient.data = source.data.view_as(gradient)

    def launch(self) -> None:
        """Make the copies, on the current stream."""
        # Whatever happens, nothing is copied twice, and nothing is kept alive.
        copies, self._copies, self.bytes = self._copies, [], 0
        if len(copies) == 1:  # nothing to gather: a plain copy costs the host least
            ((source, destination, _),) = copies
            with torch.no_grad():
                destination.copy_(source)
        else:
            pack([source for source, _, _ in copies], [destination for _, destination, _ in copies])
        for _, destination, gradient in copies:
            gradient.data = destination.view_as(gradient)


def is_watched(parameter: Tensor, own: int = 1) -> bool:
    """Whether a hook that was registered for the gradient of a parameter may look at it later.

    True when the parameter has more post-accumulate-grad hooks than DeepSpeed's ``own``. Which runs
    first does not matter, because a reader may also keep what it has seen, to read the reduced
    gradient there. Hooks of ``register_hook`` run before the gradient is accumulated and do not
    count. Hooks on the AccumulateGrad node, on other tensors and on modules cannot be found, and
    ``Pending`` is right without knowing them: see there.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    return hooks is not None and len(hooks) > own
