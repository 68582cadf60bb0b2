"""Trains two heads of one model on two ranks, each rank its own, under ZeRO-2."""

from __future__ import annotations

import torch

MEASURES = "largest parameter error against torch.optim in fp64 after 3 steps, ZeRO-2, 2 ranks"
TOLERANCE = 2e-6


def run() -> float:
    """The error of the first rank."""
    from zerofix.repro._two_ranks import errors

    heads = [[(0, 1)], [(1, 0)], [(0, 0)]]
    config = {"zero_optimization": {"stage": 2}}
    return errors(config, heads, torch.optim.SGD).max().item()
