"""Trains a model with a branch that some micro-batches leave out, under ZeRO-1/2 with offload."""

MEASURES = (
    "largest parameter error against torch.optim in fp64 after 4 steps, ZeRO-1/2 with offload"
)
TOLERANCE = 2e-6


def run() -> float:
    """The larger error of the two stages."""
    from zerofix.repro._absent import error

    return max(error({"stage": s, "offload_optimizer": {"device": "cpu"}}) for s in (1, 2))
