"""Hands parameters to the reduction in the same order on all ranks, whichever have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class ReductionOrder:
    """The order of one optimizer's parameters, and how far this backward has come in it.

    Ranks fill their buckets as gradients come. Where one rank has a gradient that another has
    not, all that follow would be added to those of other parameters. Here a parameter waits for
    its turn, and one without gradient gets zeros when its turn comes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        fill: Callable[[nn.Parameter], None],
        reduce: Callable[[nn.Parameter], None],
    ) -> None:
        """Start with the order given, until the first backward shows a better one.

        Args:
            parameters: those that can have a gradient, in the same order on all ranks.
            group: the process group that reduces them.
            fill: gives a parameter a gradient of zero, where it has none.
            reduce: hands a parameter to the reduction.
        """
        self._parameters = list(parameters)
        self._positions = {parameter: k for k, parameter in enumerate(self._parameters)}
        self._group = group
        self._fill = fill
        self._reduce = reduce
        self._next = 0
        self._waiting: dict[int, Any] = {}
        """Position to the event that marks the gradient, for those whose turn it is not."""
        self._arrived: list[nn.Parameter] | None = []
        """In the order of their hooks, in the first backward."""

    def ready(self, parameter: nn.Parameter) -> None:
        """Take a parameter whose gradient is there, from its hook."""
        position = self._positions[parameter]
        if self._arrived is not None:
            self._arrived.append(parameter)
        if position < self._next:  # a second gradient is for DeepSpeed to judge
            self._reduce(parameter)
            return
        self._waiting[position] = _event() if position > self._next else None
        while self._next in self._waiting:
            self._hand_on()

    def finish(self) -> None:
        """Take all others for absent, at the end of a backward. A collective the first time."""
        while self._next < len(self._parameters):
            self._hand_on()
        self._next = 0
        if self._arrived is not None:
            self._learn(self._arrived)
            self._arrived = None

    def _hand_on(self) -> None:
        parameter = self._parameters[self._next]
        _wait(self._waiting.pop(self._next, None))
        self._next += 1
        self._fill(parameter)
        self._reduce(parameter)

    def _learn(self, arrived: Sequence[nn.Parameter]) -> None:
        """Take over the order in which gradients came on the first rank."""
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        came = {parameter: k for k, parameter in enumerate(arrived)}
        # Who is absent comes last: nobody waits for it.
        keys = [came.get(parameter, len(came)) for parameter in self._parameters]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        message = torch.tensor(order, device=get_accelerator().current_device_name())
        comm.broadcast(message, comm.get_global_rank(self._group, 0), group=self._group)
        self._parameters = [self._parameters[k] for k in message.tolist()]
        self._positions = {parameter: k for k, parameter in enumerate(self._parameters)}


def is_equal(number: int, group: Any) -> bool:
    """Whether a number is the same on all ranks, but for what a float does not hold of it.

    A collective of 8 bytes.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    rounded = float(number & 0xFFFFFF)
    device = get_accelerator().current_device_name()
    # Every backend knows the maximum of floats.
    extremes = torch.tensor([rounded, -rounded], dtype=torch.float32, device=device)
    comm.all_reduce(extremes, op=comm.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    return bool(largest == -smallest)


def warn(group: Any, consequence: str) -> None:
    """Say on the first rank of a group that its ranks differ, and what comes of it."""
    from deepspeed import comm
    from deepspeed.utils import logger

    if comm.get_rank(group=group) == 0:
        logger.warning(
            "zerofix: ranks had gradients of different parameters in the same backward, which "
            f"DeepSpeed adds to each other. {consequence}"
        )


def _event() -> Any:
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().resolves_data_dependency():
        return None
    event = get_accelerator().Event()
    event.record(get_accelerator().current_stream())
    return event


def _wait(event: Any) -> None:
    """Gradients may come on another stream than the one that hands them on."""
    from deepspeed.accelerator import get_accelerator

    if event is not None:
        get_accelerator().current_stream().wait_event(event)
