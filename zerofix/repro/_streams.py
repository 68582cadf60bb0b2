"""What the reproductions of stream hazards share: ZeRO on virtual streams, on a CPU.

The measure of right is the same training on one stream. Gradients are produced on streams of their
own, in turn, and everything runs as late as the declared ordering allows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

_WIDTHS = (16, 16, 16, 16, 16)


class Run(NamedTuple):
    error: float
    """Largest absolute difference of a weight to the training on one stream; infinity for NaN."""
    unsafe_frees: int
    waits: int
    """Calls of ``wait_stream`` beyond two for each reduction."""


def run(zero_optimization: dict[str, Any], *, producers: int) -> Run:
    # Virtual streams are streams of CPU tensors.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from zerofix.repro._training import join_world_of_one, quiet

    with quiet():
        join_world_of_one()
        from zerofix.testing import UnsafeFree
        from zerofix.testing.accelerator import deepspeed_streams

        expected, _ = _train(zero_optimization, 0)
        with deepspeed_streams() as device:
            found, reductions = _train(zero_optimization, producers, device.counts.clear)
            waits = device.counts["wait_stream"] - 2 * reductions
    errors = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return Run(
        error=float("inf") if any(e != e for e in errors) else max(errors),
        unsafe_frees=sum(isinstance(report, UnsafeFree) for report in device.reports),
        waits=waits,
    )


def _train(
    zero_optimization: dict[str, Any], producers: int, built: Callable[[], None] = lambda: None
) -> tuple[list[Any], int]:
    """The weights after three steps, and how many buckets were reduced on the way."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    from zerofix.testing import Stream, place_gradients

    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(_WIDTHS)]
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage3_param_persistence_threshold": 0} | zero_optimization,
        },
    )
    reductions = 0
    average = getattr(engine.optimizer, "average_tensor", None)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return average(*arguments, **options)  # type: ignore[misc]

    engine.optimizer.average_tensor = counted
    built()
    parameters = list(model.parameters())
    streams = [Stream() for _ in range(producers)]
    placed: dict[torch.Tensor, Stream] = {}
    if streams:
        placed |= {p: streams[i % producers] for i, p in enumerate(parameters)}
    generator = torch.Generator().manual_seed(1)
    with place_gradients(placed):
        for _ in range(3):
            x = torch.randn(4, _WIDTHS[0], generator=generator)
            engine.backward(10 * engine(x).square().mean())
            engine.step()
        full = safe_get_full_fp32_param if zero_optimization["stage"] == 3 else torch.Tensor.detach
        return [full(parameter).clone() for parameter in parameters], reductions
