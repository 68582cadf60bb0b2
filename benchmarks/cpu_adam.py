"""A step of DeepSpeedCPUAdam with zerofix against the same step on stock DeepSpeed.

    python benchmarks/cpu_adam.py [--seconds N]

One process, and one optimizer a size: its steps go in turn through the native binding and through
that of zerofix, in the same memory. Writes benchmarks/results/cpu_adam-cpu.json.
"""

import argparse
import statistics
import time

import zerofix

SIZES = (1_000, 10_000_000)


def optimizer(size: int):
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(size))
    parameter.grad = torch.randn(size)
    return DeepSpeedCPUAdam([parameter])


def microseconds(optimizer, binding) -> float:
    optimizer.ds_opt_adam = binding
    start = time.perf_counter()
    optimizer.step()
    return 1e6 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20, help="for each size")
    seconds = parser.parse_args().seconds

    import deepspeed  # noqa: F401
    import torch
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from results import write

    from zerofix.ops import origin

    stock = CPUAdamBuilder().load()
    zerofix.apply("cpu_adam_resume")
    figures = []
    for size in SIZES:
        made = optimizer(size)
        patched = made.ds_opt_adam
        assert patched is not stock
        pairs = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            # Who goes second has the warmer caches.
            if len(pairs) % 2:
                pairs.append((microseconds(made, stock), microseconds(made, patched)))
            else:
                pairs.append((microseconds(made, patched), microseconds(made, stock))[::-1])
        pairs = pairs[len(pairs) // 20 :]
        figures.append(
            {
                "elements": size,
                "steps": len(pairs),
                "stock_us": round(statistics.median(a for a, _ in pairs), 2),
                "zerofix_us": round(statistics.median(b for _, b in pairs), 2),
                "added_us": round(statistics.median(b - a for a, b in pairs), 2),
                "ratio": round(statistics.median(b / a for a, b in pairs), 4),
            }
        )
    write(
        "cpu_adam-cpu",
        {"op": origin("cpu_adam"), "threads": torch.get_num_threads(), "figures": figures},
    )


if __name__ == "__main__":
    main()
