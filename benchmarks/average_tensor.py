"""A training step with the fixes of ZeRO-1/2's streams against the same step on stock DeepSpeed.

    [ZEROFIX_BUCKET_COPY=triton] python benchmarks/average_tensor.py [--blocks N] [--try-out]

One GPU, one process, one engine a configuration: blocks of steps alternate between stock and
patched (`zerofix.revert`, `zerofix.apply`), and the ratio is the median of those of neighbouring
blocks. Writes benchmarks/results/average_tensor-SETTING.json. `--try-out` runs a small model on
what there is, and writes nothing.
"""

import argparse
import statistics
import sys
import time

import zerofix

FIXES = ("average_tensor", "grad_lifetime", "bucket_index", "bucket_overlap")
GOAL = 1.0
"""The ratio that a step may have at most."""
STEPS = 5
MODELS = {"large": (4096, 16), "many small": (64, 1000)}
"""Width and number of the linear layers."""


def engine(stage: int, overlap: bool, width: int, layers: int):
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": overlap,
                "contiguous_gradients": True,
            },
            "zero_allow_untested_optimizer": True,
        },
    )
    return made


def seconds(made, width: int) -> float:
    import torch
    from deepspeed.accelerator import get_accelerator

    batch = torch.ones(4, width, device=made.device, dtype=torch.bfloat16)
    get_accelerator().synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        made.backward(made(batch).float().sum())
        made.step()
    get_accelerator().synchronize()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--try-out", action="store_true")
    arguments = parser.parse_args()

    import torch.distributed
    from results import write

    from zerofix.repro._training import join_world_of_one
    from zerofix.settings import bucket_copy

    if not torch.cuda.is_available() and not arguments.try_out:
        sys.exit("average_tensor needs a GPU that torch.cuda knows; --try-out tries it out")
    join_world_of_one()

    figures = []
    for name, (width, layers) in MODELS.items():
        if arguments.try_out:
            width, layers = 16, 4
        for stage, overlap in ((1, True), (2, True), (2, False)):
            made = engine(stage, overlap, width, layers)
            times: dict[str, list[float]] = {"stock": [], "zerofix": []}
            # The first two blocks of each warm up.
            for block in range(2 * arguments.blocks + 4):
                if block % 2:
                    for fix in FIXES:
                        zerofix.apply(fix)
                else:
                    zerofix.revert()
                took = seconds(made, width)
                if block >= 4:
                    times["zerofix" if block % 2 else "stock"].append(took)
            pairs = list(zip(times["stock"], times["zerofix"], strict=True))
            stock, patched = (statistics.median(times[kind]) for kind in ("stock", "zerofix"))
            figures.append(
                {
                    "model": f"{name}: {layers} linear layers of {width}",
                    "stage": stage,
                    "overlap_comm": overlap,
                    "stock_ms": round(1e3 * stock, 3),
                    "zerofix_ms": round(1e3 * patched, 3),
                    "ratio": round(statistics.median(b / a for a, b in pairs), 3),
                }
            )
            verdict = "reached" if figures[-1]["ratio"] <= GOAL else "MISSED"
            print(figures[-1], f"goal {GOAL}: {verdict}", flush=True)
            made.destroy()
    if arguments.try_out:
        print("tried out: nothing is written")
        return
    gpu = torch.cuda.get_device_name()
    write(
        f"average_tensor-{bucket_copy()}",
        {"gpu": gpu, "blocks": arguments.blocks, "steps_per_block": STEPS, "figures": figures},
    )


if __name__ == "__main__":
    main()
