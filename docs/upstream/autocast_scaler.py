"""torch_autocast in float16 from a loss scale that is too large.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 autocast_scaler.py
"""

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
lines = []
for stage in (1, 2, 3):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "torch_autocast": {"enabled": True, "dtype": "float16"},
        },
    )
    for _ in range(14):
        engine.backward(30 * engine(torch.randn(4, 8)).float().square().sum())
        engine.step()
    scale = engine.optimizer.torch_autocast_gradscaler.get_scale()
    lines.append(f"ZeRO-{stage} skipped {engine.skipped_steps:2} of 14, scale {scale:.0f}")
print(deepspeed.__version__, *lines, sep="\n")
