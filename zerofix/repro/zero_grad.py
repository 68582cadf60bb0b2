"""Throws a backward away with engine.zero_grad() before each step, under ZeRO-2 and 3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MEASURES = "largest difference of a parameter to training without those backwards, ZeRO-2/3"
TOLERANCE = 0.0


def run() -> float:
    """The larger difference of the two stages."""
    from zerofix.repro._training import quiet

    with quiet():
        pairs = [(_weight(stage, True), _weight(stage, False)) for stage in (2, 3)]
    return max((ours - right).abs().max().item() for ours, right in pairs)


def _weight(stage: int, abandon: bool) -> Tensor:
    from zerofix.repro._training import join_world_of_one

    join_world_of_one()
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,  # its default is 1.0 in some releases
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    batches = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for kept, thrown_away in batches.to(get_accelerator().current_device_name()):
        if abandon:
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(thrown_away).square().mean())
            engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(kept).square().mean())
        engine.step()
    weight: Tensor = safe_get_full_fp32_param(model.weight)
    return weight.clone()
