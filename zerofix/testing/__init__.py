"""Virtual streams: the semantics of CUDA streams for CPU tensors, to test code that uses streams.

Under ``virtual_streams`` every operation on CPU tensors is queued on the current stream, and runs
as late as the declared ordering allows or in a legal order drawn at random. A missing wait becomes
a wrong number on any machine, and a happens-before check names the two operations.
"""

from zerofix.testing.checker import Access, Race, Report, UnsafeFree
from zerofix.testing.context import virtual_streams
from zerofix.testing.device import (
    Device,
    Event,
    Stream,
    current_stream,
    default_stream,
    record_stream,
    stream,
    synchronize,
)
from zerofix.testing.lines import Line
from zerofix.testing.placement import place_gradients
from zerofix.testing.scheduler import Schedule

__all__ = [
    "Access",
    "Device",
    "Event",
    "Line",
    "Race",
    "Report",
    "Schedule",
    "Stream",
    "UnsafeFree",
    "current_stream",
    "default_stream",
    "place_gradients",
    "record_stream",
    "stream",
    "synchronize",
    "virtual_streams",
]
