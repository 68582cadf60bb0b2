"""What the reproductions of lost gradients share: a model, its training, the error.

One process is the whole world (gloo on a CPU, nccl on a GPU), without a port or a file, so that
any number of reproductions can run at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

_SIZE = 16
_BATCH = 8
_LEARNING_RATE = 1e-2


def error(
    zero_optimization: dict[str, Any],
    *,
    gradient_accumulation_steps: int,
    backwards: Sequence[int],
) -> float:
    """Largest absolute difference of a parameter to ``torch.optim.Adam`` in fp64.

    ``backwards`` has the number of backwards of each step. Steps of a number other than
    ``gradient_accumulation_steps`` set the accumulation boundary by hand, as a trainer with
    batches of varying size does.
    """
    with quiet():
        trained = _deepspeed(zero_optimization, gradient_accumulation_steps, backwards)
    expected = _plain_torch(gradient_accumulation_steps, backwards)
    pairs = zip(trained, expected, strict=True)
    return max((ours - right).abs().max().item() for ours, right in pairs)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_SIZE, _SIZE), nn.Tanh(), nn.Linear(_SIZE, 1))


def _micro_batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(_BATCH, _SIZE, generator=generator)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return (output - batch.sum(dim=1, keepdim=True)).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)


def _plain_torch(steps: int, backwards: Sequence[int]) -> list[Tensor]:
    model = _model().double()
    optimizer = _optimizer(model)
    for step, count in enumerate(backwards):
        for index in range(count):
            (_loss(model, _micro_batch(step, index).double()) / steps).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _deepspeed(
    zero_optimization: dict[str, Any], steps: int, backwards: Sequence[int]
) -> list[Tensor]:
    join_world_of_one()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_accumulation_steps": steps,
            # Its default is 1.0 in some releases.
            "gradient_clipping": 0.0,
            # The optimizer given stays: DeepSpeed's own for CPUs would be compiled first.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"reduce_bucket_size": 1000} | zero_optimization,
        },
    )
    device = get_accelerator().current_device_name()
    for step, count in enumerate(backwards):
        for index in range(count):
            if count != steps:
                engine.set_gradient_accumulation_boundary(index == count - 1)
            engine.backward(_loss(engine, _micro_batch(step, index).to(device)))
            if count == steps or index == count - 1:
                engine.step()
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def join_world_of_one() -> None:
    # DeepSpeed asks for it even where it does not launch the process.
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = get_accelerator().communication_backend_name()
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep stdout for the result, and be silent about what is no warning.

    Native code prints there when DeepSpeed logs at info, and where stdout is a pipe not before the
    process ends.
    """
    from deepspeed.utils import logger

    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(before)
