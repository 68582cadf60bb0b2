"""Trains under ZeRO-2 with the optimizer offloaded and several backwards a step."""

MEASURES = "largest parameter error against torch.optim in fp64 after 3 steps, ZeRO-2 with offload"
TOLERANCE = 2e-6


def run() -> float:
    """The larger error of two roads: the boundary set by hand, and gradient accumulation."""
    from zerofix.repro._training import error

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return max(
        error(zero, gradient_accumulation_steps=1, backwards=(3, 2, 4)),
        error(zero, gradient_accumulation_steps=3, backwards=(3, 3, 3)),
    )
