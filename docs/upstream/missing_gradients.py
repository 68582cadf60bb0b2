"""A layer that some micro-batches leave out, against plain torch where its gradient is zero.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 missing_gradients.py
"""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

STEPS = {  # for each step and micro-batch: is the branch used?
    "absent in a later step": [[1], [0], [0]],
    "absent in the first micro-batch": [[1, 1], [0, 1]],
    "present before the last micro-batch only": [[1, 0]],
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, used):
        h = torch.tanh(self.first(x))
        return self.last(h + self.branch(h) if used else h).square().mean()


def batch(step, index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + index))


def model():
    torch.manual_seed(0)
    return Model()


def plain(steps):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, micro_batches in enumerate(steps):
        for index, used in enumerate(micro_batches):
            (net(batch(step, index), used) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def deep(steps, stage, offload):
    net = model()
    zero = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": len(steps[0]),
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    for step, micro_batches in enumerate(steps):
        for index, used in enumerate(micro_batches):
            engine.backward(engine(batch(step, index), used))
            engine.step()
    return [safe_get_full_fp32_param(p) for p in net.parameters()]


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
lines = []
for name, steps in STEPS.items():
    for stage, offload in [(1, True), (2, False), (2, True), (3, False), (3, True)]:
        pairs = zip(deep(steps, stage, offload), plain(steps), strict=True)
        error = max((a - b).abs().max().item() for a, b in pairs)
        lines.append(f"{name:42} ZeRO-{stage} {'offload' if offload else '':8} {error:.1e}")
print(deepspeed.__version__, *lines, sep="\n")
