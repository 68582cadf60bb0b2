"""A backward that is thrown away with zero_grad, and one under no_sync.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 abandoned_window.py
"""

import deepspeed
import torch


def engine_of(stage, offload=False, overlap=False, bf16=False):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    zero = {"stage": stage, "overlap_comm": overlap}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    )
    return engine


def weight(stage, offload, bf16, abandon):
    engine = engine_of(stage, offload, bf16=bf16)
    batches = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    batches = batches.to(engine.module.weight.dtype)
    if abandon:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(batches[0]).square().mean())
        engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(batches[1]).square().mean())
    engine.step()
    return deepspeed.utils.safe_get_full_fp32_param(engine.module.weight).clone()


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first
deepspeed.init_distributed("gloo")
lines = []
for stage, kind in [(1, ""), (1, "bf16"), (2, ""), (2, "offload"), (3, ""), (3, "offload")]:
    weights = [weight(stage, kind == "offload", kind == "bf16", each) for each in (True, False)]
    error = (weights[0] - weights[1]).abs().max().item()
    lines.append(f"zero_grad: ZeRO-{stage} {kind:8} off by {error:.1e}")
try:
    engine = engine_of(1, overlap=True)
    with engine.no_sync():
        engine.backward(engine(torch.ones(4, 8)).sum())
    engine.backward(engine(torch.ones(4, 8)).sum())
    lines.append("no_sync: right")
except AssertionError as error:
    lines.append(f"no_sync: {' '.join(str(error).split())[:60]}")
print(deepspeed.__version__, *lines, sep="\n")
