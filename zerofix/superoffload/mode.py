"""Where there is SuperOffload, and whether its steps run ahead of the backward's end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from weakref import WeakSet

TYPE_CHECKING = False
if TYPE_CHECKING:  # the command line explains without torch
    from zerofix.config import Training
    from zerofix.superoffload.speculation import Speculation

GIB = 1 << 30
BYTES = 28
"""Of shared memory, for each parameter: the gradient and two states. Plain offload has 16."""

engines: WeakSet[Speculation] = WeakSet()
"""Those of this process that are not destroyed."""


def hit_by(training: Training) -> bool:
    """Whether a training uses SuperOffload."""
    return (
        training.stage == 3
        and training.offloads_optimizer
        and training.get("zero_optimization.offload_optimizer.super_offload", False)
    )


def modes() -> tuple[str, ...]:
    """How each SuperOffload engine of this process steps; without one, what one would do."""
    if engines:
        return tuple(f"SuperOffload steps {engine.mode}" for engine in engines)
    if not hasattr(os, "memfd_create"):
        return ("SuperOffload would step as plain offload: no shared memory on this system",)
    free = available()
    return (
        f"SuperOffload would step during the backward with up to {free // BYTES:.1e} parameters "
        f"in CPU memory on this node ({free / GIB:.1f} GiB are free), else as plain offload",
    )


def needed(sizes: Sequence[int]) -> int:
    """Bytes of shared memory for subgroups of these numbers of elements."""
    return BYTES * sum(sizes)


def available() -> int:
    """Bytes that this process may still take without swapping, its control group considered."""
    from pathlib import Path

    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")  # of version 2, as seen in a container
    with contextlib.suppress(OSError, ValueError):  # there is none, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # What files were read is kept as long as nobody needs the memory.
        free = min(free, limit - used + int(counts["inactive_file"]))
    return free
