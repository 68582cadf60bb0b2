"""What `import zerofix` adds to an empty interpreter, and patching to `import deepspeed`.

    python benchmarks/import_time.py [--runs N]

Every program runs in a process of its own, stock and with zerofix in turn. Writes
benchmarks/results/import_time.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from results import write

PROGRAMS = {
    "interpreter": ("pass", "import zerofix"),
    "deepspeed": ("import deepspeed", "import zerofix, deepspeed"),
}


def seconds(program: str) -> float:
    environ = os.environ | {"ZEROFIX_LOG": "quiet"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environ)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    figures = {}
    for name, (stock, with_zerofix) in PROGRAMS.items():
        pairs = [(seconds(stock), seconds(with_zerofix)) for _ in range(runs + 1)][1:]
        figures[name] = {
            "stock_ms": round(1e3 * min(a for a, _ in pairs), 1),
            "zerofix_ms": round(1e3 * min(b for _, b in pairs), 1),
            "added_ms_median": round(1e3 * statistics.median(b - a for a, b in pairs), 1),
        }
    write("import_time", {"runs": runs, "figures": figures})


if __name__ == "__main__":
    main()
