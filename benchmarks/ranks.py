"""What it costs that all ranks agree: many ranks against one real TCPStore.

    python benchmarks/ranks.py [--runs N]

Every rank is a thread with a connection of its own, and all of them share the interpreter: in a
real job only the store and rank 0 are shared. Writes benchmarks/results/ranks.json.
"""

import argparse
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from results import write
from torch.distributed import TCPStore

import zerofix
from zerofix.patches import CATALOGUE
from zerofix.ranks import Check

DIGEST = {"zerofix": zerofix.__version__, "DeepSpeed": "0.18.4", "ZEROFIX_BUCKET_COPY": "auto"}
DIGEST |= {fix.name: "applied" for fix in CATALOGUE}


class Counted:
    """A store that counts requests and the bytes of keys and values, both ways."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def __getattr__(self, name: str) -> object:
        function = getattr(self._store, name)

        def counted(*arguments: object) -> object:
            result = function(*arguments)
            self.requests[name] += 1
            self.bytes += sum(map(size, (*arguments, result)))
            return result

        return counted


def size(value: object) -> int:
    if isinstance(value, list):
        return sum(map(size, value))
    return len(value) if isinstance(value, str | bytes) else 0


def agree(world_size: int) -> dict[str, object]:
    timeout = timedelta(seconds=60)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)

    def connect(_: int) -> Counted:
        return Counted(TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout))

    with ThreadPoolExecutor(64) as pool:
        stores = list(pool.map(connect, range(world_size)))
    seconds = [0.0] * world_size
    start = threading.Barrier(world_size)

    def rank(number: int) -> None:
        start.wait()
        began = time.perf_counter()
        check = Check(stores[number], number, world_size, DIGEST)
        assert check.before() == check.after() == ""
        seconds[number] = time.perf_counter() - began

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "slowest_ms": 1e3 * max(seconds),
        "requests_of_rank_0": sum(stores[0].requests.values()),
        "requests_of_another": max(sum(store.requests.values()) for store in stores[1:]),
        "bytes_of_rank_0": stores[0].bytes,
        "bytes_of_another": max(store.bytes for store in stores[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    results = {}
    for world_size in (2, 8, 64, 256, 1024):
        measured = [agree(world_size) for _ in range(runs)]
        times = [run.pop("slowest_ms") for run in measured]
        results[world_size] = {
            "ms": {"best": min(times), "median": statistics.median(times)},
            **measured[-1],
        }
        print(world_size, results[world_size])
    write("ranks", {"runs": runs, "ranks": results})


if __name__ == "__main__":
    main()
