"""Trains under torch_autocast in float16, from a loss scale that is too large."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MEASURES = "steps that change no weight, of 16, beyond those of torch.amp; ZeRO-1/2/3"
TOLERANCE = 0.0

_STEPS = 16


def run() -> float:
    """The largest number of the three stages."""
    from deepspeed.accelerator import get_accelerator

    from zerofix.repro._training import quiet

    device = get_accelerator().device_name()
    expected = _plain_torch(device)
    with quiet():
        lost = max(_deepspeed(stage, device) for stage in (1, 2, 3))
    return max(0, lost - expected)  # releases without torch_autocast train in fp32


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def _loss(model: nn.Module, step: int, device: str) -> Tensor:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
    output: Tensor = model(batch)
    # Its gradients overflow at the first scale of 65536.
    return 30 * output.float().square().sum()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def _plain_torch(device: str) -> int:
    model = _model().to(device)
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler(device)
    lost = 0
    for step in range(_STEPS):
        before = model.weight.clone()
        with torch.autocast(device, dtype=torch.float16):
            loss = _loss(model, step, device)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        lost += torch.equal(model.weight, before)
    return lost


def _deepspeed(stage: int, device: str) -> int:
    from zerofix.repro._training import join_world_of_one

    join_world_of_one()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,  # its default is 1.0 in some releases
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "torch_autocast": {"enabled": True, "dtype": "float16"},
        },
    )
    lost = 0
    for step in range(_STEPS):
        before = safe_get_full_fp32_param(model.weight).clone()
        engine.backward(_loss(engine, step, device))
        engine.step()
        lost += torch.equal(safe_get_full_fp32_param(model.weight), before)
    return lost
