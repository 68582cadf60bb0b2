"""What reproductions with two ranks share: a model of two heads, its training, the errors.

The ranks are processes on CPUs, with gloo and a store in a temporary folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

Heads = Sequence[Sequence[Sequence[int]]]
"""For each step and micro-batch, the head that each rank uses."""

_SIZE = 8
_BATCH = 4


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_SIZE, _SIZE)
        self.head0, self.head1 = (nn.Parameter(torch.randn(_SIZE, _SIZE)) for _ in range(2))

    def forward(self, batch: Tensor, head: int) -> Tensor:
        output: Tensor = self.first(batch) @ (self.head0, self.head1)[head]
        return output.square().mean()


def errors(config: dict[str, Any], heads: Heads, optimizer: type[torch.optim.Optimizer]) -> Tensor:
    """Absolute differences of all parameters to plain torch in fp64, as the first rank has them.

    ``config`` goes into the configuration, its zero_optimization whole. The model is in bf16 where
    that asks for it, else in fp32.
    """
    from deepspeed.accelerator import get_accelerator

    # A process that has used a GPU cannot be forked; where there is none, that saves the imports.
    method = "fork" if get_accelerator().device_name() == "cpu" else "spawn"
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        context: Any = multiprocessing.get_context(method)
        arguments = (folder, config, heads, optimizer)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if codes := [each.exitcode for each in ranks if each.exitcode]:
            raise RuntimeError(f"a rank ended with {codes[0]}")
        return torch.tensor(json.loads(Path(folder, "errors").read_text()))


def _rank(
    rank: int,
    folder: str,
    config: dict[str, Any],
    heads: Heads,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    """Train as one of the ranks; the first one writes the errors."""
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
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    ours = _deepspeed(rank, dtype, config, heads, optimizer)
    difference = (ours - _plain_torch(dtype, heads, optimizer)).abs()
    if rank == 0:
        Path(folder, "errors").write_text(json.dumps(difference.tolist()))


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return _Model().to(dtype)


def _batch(step: int, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(_BATCH, _SIZE, generator=generator)


def _plain_torch(
    dtype: torch.dtype, heads: Heads, optimizer: type[torch.optim.Optimizer]
) -> Tensor:
    model = _model(dtype).double()
    steps = optimizer(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    for step, micro_batches in enumerate(heads):
        for index, ranks in enumerate(micro_batches):
            for rank, head in enumerate(ranks):
                loss = model(_batch(step, index, rank).to(dtype).double(), head)
                (loss / len(ranks) / len(micro_batches)).backward()
        steps.step()
        steps.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _deepspeed(
    rank: int,
    dtype: torch.dtype,
    config: dict[str, Any],
    heads: Heads,
    optimizer: type[torch.optim.Optimizer],
) -> Tensor:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = _model(dtype)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(model.parameters(), lr=1e-2),  # type: ignore[call-arg]
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_accumulation_steps": len(heads[0]),
            "gradient_clipping": 0.0,  # its default is 1.0 in some releases
            "zero_allow_untested_optimizer": True,
            # The optimizer given stays: DeepSpeed's own for CPUs would be compiled first.
            "zero_force_ds_cpu_optimizer": False,
        }
        | config,
    )
    for step, micro_batches in enumerate(heads):
        for index, ranks in enumerate(micro_batches):
            engine.backward(engine(_batch(step, index, rank).to(dtype), ranks[rank]))
            engine.step()
    masters = [safe_get_full_fp32_param(parameter) for parameter in model.parameters()]
    weights = model.parameters() if None in masters else masters
    return torch.cat([weight.detach().double().flatten() for weight in weights])
