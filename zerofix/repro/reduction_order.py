"""Trains two heads of one model on two ranks, each rank its own, under ZeRO-2.

The ranks are processes on CPUs, with gloo and a store in a temporary folder.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

MEASURES = "largest parameter error against torch.optim in fp64 after 3 steps, ZeRO-2, 2 ranks"
TOLERANCE = 2e-6

_SIZE = 8
_BATCH = 4
_HEADS = ((0, 1), (1, 0), (0, 0))
"""For each step, the head that each rank uses."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_SIZE, _SIZE)
        self.head0, self.head1 = (nn.Parameter(torch.randn(_SIZE, _SIZE)) for _ in range(2))

    def forward(self, batch: Tensor, head: int) -> Tensor:
        output: Tensor = self.first(batch) @ (self.head0, self.head1)[head]
        return output.square().mean()


def run() -> float:
    """The error of the first rank."""
    from deepspeed.accelerator import get_accelerator

    # A process that has used a GPU cannot be forked; where there is none, that saves the imports.
    method = "fork" if get_accelerator().device_name() == "cpu" else "spawn"
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        context: Any = multiprocessing.get_context(method)
        ranks = [context.Process(target=_rank, args=(rank, folder)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if codes := [each.exitcode for each in ranks if each.exitcode]:
            raise RuntimeError(f"a rank ended with {codes[0]}")
        return float(Path(folder, "error").read_text())


def _rank(rank: int, folder: str) -> None:
    """Train as one of the ranks; the first one writes the error."""
    os.environ["LOCAL_RANK"] = str(rank)
    import zerofix  # noqa: F401, I001
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Where there is memory for it 0.18.7 to 0.18.9 flatten weights on the device, and on a CPU with
    # several ranks end in an error at the first step.
    get_accelerator().available_memory = lambda *_: 0
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see _training
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    pairs = zip(_deepspeed(rank), _plain_torch(), strict=True)
    worst = max((ours - right).abs().max().item() for ours, right in pairs)
    if rank == 0:
        Path(folder, "error").write_text(repr(worst))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Model()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(_BATCH, _SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def _plain_torch() -> list[Tensor]:
    model = _model().double()
    optimizer = _optimizer(model)
    for step, heads in enumerate(_HEADS):
        for rank, head in enumerate(heads):
            (model(_batch(step, rank).double(), head) / len(heads)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _deepspeed(rank: int) -> list[Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_clipping": 0.0,  # its default is 1.0 in some releases
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    for step, heads in enumerate(_HEADS):
        engine.backward(engine(_batch(step, rank), heads[rank]))
        engine.step()
    return [safe_get_full_fp32_param(parameter).double() for parameter in model.parameters()]
