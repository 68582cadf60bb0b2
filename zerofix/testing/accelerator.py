"""Shows DeepSpeed's CPU accelerator virtual streams, so that its engine takes the road of a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator

from zerofix.testing import device as virtual
from zerofix.testing import lines
from zerofix.testing.context import virtual_streams
from zerofix.testing.scheduler import Schedule


def with_streams(own: Any) -> Any:
    """An accelerator's class with the answers of a device that has streams.

    Derived from that class alone: an object can change to a class of the same layout only.
    """

    class Virtual(own):  # type: ignore[misc]
        Stream = virtual.Stream
        Event = virtual.Event

        def is_synchronized_device(self) -> bool:
            return False

        def on_accelerator(self, tensor: Any) -> bool:
            return True

        def stream(self, value: virtual.Stream | None) -> AbstractContextManager[None]:
            return virtual.stream(value)

        def current_stream(self, device_index: int | None = None) -> virtual.Stream:
            return virtual.current_stream()

        def default_stream(self, device_index: int | None = None) -> virtual.Stream:
            return virtual.default_stream()

        def synchronize(self, device_index: int | None = None) -> None:
            virtual.synchronize()

    return Virtual


@contextmanager
def deepspeed_streams(schedule: Schedule = "lazy") -> Iterator[virtual.Device]:
    """``virtual_streams`` that DeepSpeed's accelerator answers with, too.

    Build the engine inside, after ``deepspeed.init_distributed``. The accelerator must be the CPU's
    (``DS_ACCELERATOR=cpu``); else RuntimeError.
    """
    accelerator = get_accelerator()
    own = type(accelerator)
    if accelerator.device_name() != "cpu":
        raise RuntimeError(f"virtual streams need DeepSpeed's CPU accelerator, not {own.__name__}")
    # A report should name the optimizer's line, not the wrapper's around a collective.
    package = os.path.dirname(deepspeed.__file__)
    layers = [os.path.join(package, name) + os.sep for name in ("comm", "utils")]
    accelerator.__class__ = with_streams(own)
    lines.INTERNAL.extend(layers)
    try:
        with virtual_streams(schedule) as device:
            yield device
    finally:
        accelerator.__class__ = own
        for layer in layers:
            lines.INTERNAL.remove(layer)
