"""The memory that the training process and its worker share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FIELDS = 7
_ALIGNED = 16
"""Elements; 64 bytes, a cache line."""


class State(NamedTuple):
    """Of one subgroup; fp32, one dimension."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Buffers(NamedTuple):
    """What a step on one subgroup reads and writes."""

    gradient: Tensor
    states: tuple[State, State]
    """The one in force, and the one that a step writes; which is which changes with each step."""


class Memory:
    """The buffers of all subgroups, in one anonymous file that both processes map."""

    def __init__(self, sizes: Sequence[int], file: int | None = None) -> None:
        """Make the memory (all zero), or map that of another process.

        Args:
            sizes: elements of each subgroup.
            file: descriptor of the memory of the other process.
        """
        room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        length = mmap.PAGESIZE + 4 * _FIELDS * sum(room)
        if file is None:
            file = os.memfd_create("zerofix-superoffload")
            os.ftruncate(file, length)
        self.file = file
        whole = mmap.mmap(file, length)
        # One storage a tensor: a checkpoint holds the whole storage of each tensor in it.
        self.cancelled = torch.frombuffer(whole, dtype=torch.int64, count=1)
        """The number of the last task that need not be done."""
        offset = mmap.PAGESIZE
        fields: list[list[Tensor]] = []
        for _ in range(_FIELDS):
            fields.append([])
            for size, taken in zip(sizes, room, strict=True):
                fields[-1].append(
                    torch.frombuffer(whole, dtype=torch.float32, count=size, offset=offset)
                )
                offset += 4 * taken
        self.subgroups = [
            Buffers(gradient, (State(*one), State(*other)))
            for gradient, *states in zip(*fields, strict=True)
            for one, other in [(states[:3], states[3:])]
        ]
        self.gradients = torch.frombuffer(
            whole, dtype=torch.uint8, count=4 * sum(room), offset=mmap.PAGESIZE
        )
        """The bytes of all gradients."""

    def close_file(self) -> None:
        """Give the descriptor back; what is mapped stays."""
        os.close(self.file)
