"""Puts the last part of a parameter's backward, and its gradient hooks, on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerofix.testing.device import Stream, active


@contextmanager
def place_gradients(streams: Mapping[Tensor, Stream]) -> Iterator[None]:
    """Produce each parameter's gradient, accumulate it and run its hooks on the given stream.

    On a GPU, autograd runs a node on the stream of its forward: a parameter used on a side stream,
    or compiled into a graph that has several, has its gradient produced and its hooks run there.
    Autograd orders a node after the ones it gets gradients from, and the stream that called
    ``backward`` after all of them when it ends. Inside this context all of that holds for the
    parameters named; the others stay on the stream that calls ``backward``.

    Enter it when all hooks that should run on the streams are registered, with DeepSpeed after
    ``deepspeed.initialize``.
    """
    entering: list[Any] = []
    leaving: dict[Tensor, Any] = {}
    before: dict[Tensor, Stream] = {}
    callers: list[Stream] = []

    def end() -> None:
        caller = callers.pop()
        for stream in dict.fromkeys(streams.values()):
            caller.follow(stream.mark())

    def leave_after(parameter: Tensor) -> None:
        def hook(*_: Any) -> None:
            active().current = before.pop(parameter)

        # Hooks of a parameter are of two kinds, and those of the node that accumulates its
        # gradient come last. That node is of this forward, and its hooks run as registered.
        if parameter in leaving:
            leaving[parameter].remove()
        with torch.enable_grad():
            node: Any = parameter.expand_as(parameter).grad_fn
        leaving[parameter] = node.next_functions[0][0].register_hook(hook)

    def enter(parameter: Tensor, stream: Stream) -> Any:
        def hook(grad: Tensor) -> Tensor:
            leave_after(parameter)
            device = active()
            if not callers:
                callers.append(device.current)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            before[parameter] = device.current
            stream.follow(device.current.mark())
            # Autograd does the same for a gradient that one stream makes and another uses.
            device.retain(grad, stream)
            device.current = stream
            return grad.clone()

        return hook

    for parameter, stream in streams.items():
        own: Any = parameter  # torch has no types for hooks
        entering.append(own.register_hook(enter(parameter, stream)))
    try:
        yield
    finally:
        for handle in [*entering, *leaving.values()]:
            handle.remove()
