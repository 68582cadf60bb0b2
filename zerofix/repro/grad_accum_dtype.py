"""Trains in bf16 on two ranks under ZeRO-1 with offload, with gradients summed in fp32."""

from __future__ import annotations

import torch

MEASURES = "largest parameter error against torch.optim in fp64 after 3 steps, ZeRO-1, 2 ranks"
TOLERANCE = 1e-3
"""Gradients are of bf16."""


def run() -> float:
    """The error of the first rank."""
    from zerofix.repro._two_ranks import errors

    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    return errors(config, [[(0, 0), (1, 1)]] * 3, torch.optim.SGD).max().item()
