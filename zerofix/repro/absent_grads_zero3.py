"""Trains a model with a branch that some micro-batches leave out, under ZeRO-3."""

MEASURES = "largest parameter error against torch.optim in fp64 after 4 steps, ZeRO-3"
TOLERANCE = 2e-6


def run() -> float:
    """The larger error of two roads: without offload and with."""
    from zerofix.repro._absent import error

    offload = {"offload_optimizer": {"device": "cpu"}}
    return max(error({"stage": 3} | more) for more in ({}, offload))
