"""The norm of the gradients on two ranks of which each uses a head of its own.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 norm_of_bf16.py
"""

import deepspeed
import torch
import torch.distributed
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](x).float().square().mean()


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(
    model=(model := Model()),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
rank = torch.distributed.get_rank()
batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
engine.backward(engine(batch, rank))
engine.step()
norms = [torch.zeros(()), torch.zeros(())]
torch.distributed.all_gather(norms, torch.as_tensor(float(engine.get_global_grad_norm())))
if rank == 0:
    print(deepspeed.__version__, *(f"rank {k}: {norm:.3f}" for k, norm in enumerate(norms)))
