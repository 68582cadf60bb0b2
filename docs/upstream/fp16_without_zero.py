"""One step of SGD in fp16 without ZeRO, against plain torch.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 fp16_without_zero.py
"""

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # torch has it on CPUs too
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).half()
before = model.weight.detach().clone()
batch = torch.randn(4, 8).half()
model(batch).float().square().mean().backward()
right = -0.1 * model.weight.grad
model.weight.grad = model.bias.grad = None
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "loss_scale": 1024.0},
        "gradient_clipping": 0.0,
    },
)
engine.backward(engine(batch).float().square().mean())
engine.step()
change = (model.weight.detach() - before).abs().max().item()
print(deepspeed.__version__, f"change {change:.1e}, right {right.abs().max().item():.1e}")
