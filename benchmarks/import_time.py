"""What `import zerofix` adds to an empty interpreter, and what patching adds to DeepSpeed.

    python benchmarks/import_time.py [--runs N]

Every run is a process of its own. Patching is timed inside: the import of zerofix where DeepSpeed
is imported already, which looks at every target and rebuilds what is to be changed. Writes
benchmarks/results/import_time.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from results import write

PATCHING = """
import deepspeed, time
start = time.perf_counter()
import zerofix
print(time.perf_counter() - start)
"""


def run(program: str) -> str:
    environ = os.environ | {"ZEROFIX_LOG": "quiet"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout


def seconds(program: str) -> float:
    start = time.perf_counter()
    run(program)
    return time.perf_counter() - start


def milliseconds(times: list[float]) -> dict[str, float]:
    best, middle = min(times), statistics.median(times)
    return {"min_ms": round(1e3 * best, 1), "median_ms": round(1e3 * middle, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    run("import zerofix")  # compiles it
    added = [seconds("import zerofix") - seconds("pass") for _ in range(runs)]
    patching = [float(run(PATCHING).splitlines()[-1]) for _ in range(max(3, runs // 4))]
    figures = {"import zerofix": milliseconds(added), "patching": milliseconds(patching)}
    write("import_time", {"runs": runs, "figures": figures})


if __name__ == "__main__":
    main()
