"""What the reproductions of missing gradients share: a branched model, its training, the error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerofix.repro._training import join_world_of_one, quiet

_SIZE = 16
_BATCH = 8
_USED = ((1, 1), (0, 1), (1, 0), (0, 0))
"""For each step and micro-batch, whether it uses the branch."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_SIZE, _SIZE)
        self.branch = nn.Linear(_SIZE, _SIZE)
        self.last = nn.Linear(_SIZE, 1)

    def forward(self, batch: Tensor, used: bool) -> Tensor:
        hidden = torch.tanh(self.first(batch))
        output: Tensor = self.last(hidden + self.branch(hidden) if used else hidden)
        return output


def error(zero_optimization: dict[str, Any]) -> float:
    """Largest absolute difference of a parameter to ``torch.optim.Adam`` in fp64.

    A missing gradient is zero there.
    """
    with quiet():
        trained = _deepspeed(zero_optimization)
    pairs = zip(trained, _plain_torch(), strict=True)
    return max((ours - right).abs().max().item() for ours, right in pairs)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Model()


def _loss(model: nn.Module, step: int, index: int, place: torch.dtype | str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    batch = torch.randn(_BATCH, _SIZE, generator=generator).to(place)
    output: Tensor = model(batch, bool(_USED[step][index]))
    return (output - batch.sum(dim=1, keepdim=True)).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _plain_torch() -> list[Tensor]:
    model = _model().double()
    optimizer = _optimizer(model)
    for step, micro_batches in enumerate(_USED):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for index in range(len(micro_batches)):
            loss = _loss(model, step, index, torch.float64) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _deepspeed(zero_optimization: dict[str, Any]) -> list[Tensor]:
    join_world_of_one()
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_accumulation_steps": len(_USED[0]),
            # Its default is 1.0 in some releases.
            "gradient_clipping": 0.0,
            # The optimizer given stays: DeepSpeed's own for CPUs would be compiled first.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"reduce_bucket_size": 1000} | zero_optimization,
        },
    )
    device = get_accelerator().current_device_name()
    for step, micro_batches in enumerate(_USED):
        for index in range(len(micro_batches)):
            engine.backward(_loss(engine, step, index, device))
            engine.step()
    return [safe_get_full_fp32_param(p).double().cpu() for p in model.parameters()]
