"""Collectives with NCCL's ordering: each process group has a communication stream.

A collective comes after what the current stream had at the call; the stream that waits for its
handle comes after it. All ranks run all collectives in the order of their issue, under every
schedule, because gloo runs them one by one and ranks that disagree would wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_map

from zerofix.testing.device import Device, Event, Stream
from zerofix.testing.memory import Place


class Work(c10d.Work):
    """The handle of a queued collective."""

    def __init__(self, device: Device, event: Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self.device = device
        self.event = event
        # As NCCL's, a handle keeps the tensors until somebody waits for it.
        self.tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        self.device.current.follow(self.event)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return self.event.query()


def collective(
    device: Device, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Queue one of ``torch.ops.c10d``; returns what it would, with a virtual handle."""
    group = next(a for a in args if isinstance(a, torch.ScriptObject))
    stream = communicator(device, dist.ProcessGroup.unbox(group).group_name)
    groups = [value for value in args if isinstance(value, list | Tensor)]
    tensors = [
        [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)] for value in groups
    ]
    tensors = [group for group in tensors if group]
    barrier = func._schema.name == "c10d::barrier"
    sends = func._schema.name == "c10d::send"
    found = [[device.memory.find(tensor) for tensor in group] for group in tensors]
    writes = [] if barrier or sends else found[0]
    reads = [] if barrier else found[0] if sends else found[-1]

    kept = tree_map(
        lambda leaf: device.memory.find(leaf)[1] if isinstance(leaf, Tensor) else leaf,
        (args, kwargs),
    )

    def run() -> None:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            arguments, options = tree_map(
                lambda leaf: leaf.tensor() if isinstance(leaf, Place) else leaf, kept
            )
            answer = func(*arguments, **options)
            handle = answer[1] if isinstance(answer, tuple) else answer
            c10d.Work.unbox(handle).wait()

    stream.follow(device.current.mark())
    device.last_collective = device.issue(
        str(func), stream, run, reads=reads, writes=writes, after=[device.last_collective]
    )
    event = stream.mark()
    handle = Work(device, event, [tensor for group in tensors for tensor in group])
    # C++ does not keep a Python handle alive.
    device.handles.append(handle)
    if barrier:
        device.finish(event.operation, event.clock)
    if len(func._schema.returns) == 1:
        return handle.boxed()
    return args[0], handle.boxed()


def communicator(device: Device, group: str) -> Stream:
    if group not in device.communicators:
        device.communicators[group] = Stream(device=device)
    return device.communicators[group]
