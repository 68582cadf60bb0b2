"""What the reproductions of SuperOffload share: training with it and without, the difference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from zerofix.repro._training import join_world_of_one, quiet

_SIZE = 16
_BATCH = 8
_STEPS = 5


def error(*, sub_group_size: int, unused: bool) -> float:
    """Largest absolute difference of a master weight to the same training with plain offload.

    Infinite when SuperOffload cannot start. Zero when this DeepSpeed has no SuperOffload.

    Args:
        unused: whether the model has a layer that gets no gradient.
    """
    try:
        import deepspeed.runtime.superoffload  # noqa: F401
    except ModuleNotFoundError:
        return 0.0
    join_world_of_one()
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        stand_in()
    with quiet():
        expected = _train(sub_group_size, unused, super_offload=False)
        try:
            trained = _train(sub_group_size, unused, super_offload=True)
        except TypeError as failure:
            if "multiple values" in str(failure):  # 0.18.0 to 0.18.3
                return math.inf
            raise
    return max(
        (ours - right).abs().max().item() for ours, right in zip(trained, expected, strict=True)
    )


def is_rewritten() -> bool:
    """Whether SuperOffload is that of 0.18.9 and later."""
    try:
        from deepspeed.runtime.superoffload import superoffload_stage3
    except ModuleNotFoundError:
        return False
    optimizer = superoffload_stage3.SuperOffloadOptimizer_Stage3
    return hasattr(optimizer, "_step_without_clipping")


def stand_in() -> None:
    """Let SuperOffload run on a CPU.

    It insists on CUDA, for streams and pinned memory that a CPU does not need.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3, superoffload_utils

    accelerator: Any = get_accelerator()
    accelerator.current_stream = _Stream
    # 0.18.7 to 0.18.9 flatten weights where there is memory for it, which fails on a CPU.
    accelerator.available_memory = lambda *_: 0
    superoffload_stage3._validate_superoffload_accelerator = lambda: None
    superoffload_utils.superoffload_optimizer_worker = _work_without_pinning


class _Stream:
    def __init__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


def _work_without_pinning(*args: Any) -> None:
    """DeepSpeed's worker, in its own process."""
    from deepspeed.runtime.superoffload.superoffload_utils import superoffload_optimizer_worker

    empty: Any = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **kwargs: empty(*sizes, **kwargs)
    superoffload_optimizer_worker(*args)


class _Model(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_SIZE, _SIZE), nn.Tanh(), nn.Linear(_SIZE, 1))
        self.unused = nn.Linear(_SIZE, 1) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def _train(sub_group_size: int, unused: bool, *, super_offload: bool) -> list[Tensor]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    model = _Model(unused)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            # Its default is 1.0 in some releases.
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": sub_group_size,
                "offload_optimizer": {"device": "cpu", "super_offload": super_offload},
            },
        },
    )
    device = get_accelerator().current_device_name()
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(1000 + step)
        batch = torch.randn(_BATCH, _SIZE, generator=generator).to(device, torch.bfloat16)
        engine.backward((engine(batch) - batch.sum(dim=1, keepdim=True)).float().square().mean())
        engine.step()
    weights = [flat.detach().clone() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    worker = getattr(engine.optimizer, "superoffload_cpu_optimizer", None)
    if worker is not None:
        worker.close()  # DeepSpeed's own would stay
    engine.destroy()
    return weights
