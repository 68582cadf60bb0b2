"""Ranks that use different heads of one shape, against plain torch.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 different_parameters.py
"""

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

USED = {  # for each micro-batch of the step, the head of each rank
    "each rank its own head": [(0, 1)],
    "a head used before the last micro-batch only": [(0, 0), (1, 1)],
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        # Of one module: ZeRO-3 gathers both on all ranks.
        self.head0, self.head1 = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x, head):
        return (self.first(x) @ (self.head0, self.head1)[head]).square().mean()


def model():
    torch.manual_seed(0)
    return Model()


def batch(index, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * index + rank))


def plain(used):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for index, heads in enumerate(used):
        for rank, head in enumerate(heads):
            (net(batch(index, rank), head) / len(used) / len(heads)).backward()
    optimizer.step()
    return list(net.parameters())


def deep(used, stage, overlap):
    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": len(used),
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "overlap_comm": overlap},
            "zero_allow_untested_optimizer": True,
        },
    )
    rank = torch.distributed.get_rank()
    for index, heads in enumerate(used):
        engine.backward(engine(batch(index, rank), heads[rank]))
        engine.step()
    return [safe_get_full_fp32_param(p) for p in net.parameters()]


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
lines = []
for name, used in USED.items():
    for stage, overlap in [(1, False), (1, True), (2, False), (3, False)]:
        pairs = zip(deep(used, stage, overlap), plain(used), strict=True)
        error = max((a - b).abs().max().item() for a, b in pairs)
        lines.append(f"{name:46} ZeRO-{stage} {'overlap' if overlap else '':8} {error:.1e}")
if torch.distributed.get_rank() == 0:
    print(deepspeed.__version__, *lines, sep="\n")
