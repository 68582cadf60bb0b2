"""Trains in bf16 on two ranks under ZeRO-1, with gradients summed in fp32."""

from __future__ import annotations

import torch

MEASURES = "mean parameter error against torch.optim in fp64 after 10 steps, ZeRO-1, 2 ranks"
TOLERANCE = 5e-3
"""Gradients are of bf16; from 0.17.6 to 0.18.4 nobody can ask for the weights in fp32."""


def run() -> float:
    """The error of the first rank."""
    from zerofix.repro._two_ranks import errors

    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    }
    return errors(config, [[(0, 0)]] * 10, torch.optim.Adam).mean().item()
