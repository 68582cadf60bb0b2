"""Turns virtual streams on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerofix.testing.device import Device, _active, record_stream
from zerofix.testing.dispatch import Dispatch
from zerofix.testing.scheduler import Schedule


@contextmanager
def virtual_streams(schedule: Schedule = "lazy") -> Iterator[Device]:
    """Give CPU tensors the semantics of CUDA streams in this thread.

    At the end all work is run, so that the tensors can be used as usual; after an exception what
    did not run yet is dropped. Raises RuntimeError inside another such context, and ValueError for
    an unknown schedule.
    """
    if _active:
        raise RuntimeError("virtual streams do not nest")
    device = Device(schedule)

    def reading(original: Any) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            device.current.finish()
            return original(self, *args, **kwargs)

        return read

    # The first has an argument that must be torch's own stream; the others read memory without an
    # operator. All are inherited from a base in C++, and so deleting them restores them.
    methods = {
        "record_stream": record_stream,
        "tolist": reading(Tensor.tolist),
        "numpy": reading(Tensor.numpy),
    }
    _active.append(device)
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    try:
        with Dispatch(device):
            yield device
            device.drain()
    finally:
        for name in methods:
            delattr(torch.Tensor, name)
        device.close()
        _active.pop()
