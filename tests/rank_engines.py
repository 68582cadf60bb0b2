"""Makes real engines on two ranks that are not the same.

Imports no zerofix: a rank does, or not, when its environment is as it is to be.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from processes import ask


def engines(zero: Any = None, one: Any = None, **both: Any) -> tuple[list[Any], list[str]]:
    """What became of the two ranks, and what they wrote.

    Of each rank can be given: ``environ``, further variables; ``zerofix``, false to go without;
    ``version``, what DeepSpeed says; ``sleep``, seconds before it makes its engines. Of both:
    ``wait`` and ``grace``, instead of those of zerofix.ranks; ``count``, how many engines.
    """
    request = {"ranks": [zero or {}, one or {}], **both}
    told, logs = ask(worker, request, 2, patched=True, timeout=150)
    return told, logs


def worker(folder: Path) -> None:
    """Make the engines; rank 0 answers for both ranks."""
    request = json.loads((folder / "request.json").read_text())
    rank = int(os.environ["RANK"])
    own = request["ranks"][rank]
    os.environ.update(own.get("environ", {}))
    spent: list[float] = []
    if own.get("zerofix", True):
        from zerofix import ranks

        ranks.WAIT = request.get("wait", ranks.WAIT)
        ranks.GRACE = request.get("grace", ranks.GRACE)
        time_into(spent, ranks, "_check_of_this_process")
        time_into(spent, ranks.Check, "before")
        time_into(spent, ranks.Check, "after")
    import deepspeed
    import torch

    if "version" in own:
        deepspeed.__version__ = own["version"]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    address = f"tcp://127.0.0.1:{port(folder, rank)}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=2)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.distributed.barrier()
    time.sleep(own.get("sleep", 0))
    start = time.monotonic()
    told: dict[str, Any] = {"error": "", "engines": 0}
    try:
        for _ in range(request.get("count", 1)):
            model = torch.nn.Linear(4, 4)
            deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0},
            )
            told["engines"] += 1
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    told |= {"seconds": time.monotonic() - start, "spent": spent}
    (folder / f"telling{rank}").write_text(json.dumps(told))
    (folder / f"telling{rank}").rename(folder / f"told{rank}")
    if rank == 0:
        both = [json.loads(text_of(folder / f"told{r}")) for r in range(2)]
        logs = [(folder.parent / f"{r}.log").read_text() for r in range(2)]
        (folder / "answer.json").write_text(json.dumps([both, logs]))


def port(folder: Path, rank: int) -> str:
    """A free port that rank 0 chooses."""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (folder / "choosing").write_text(str(free.getsockname()[1]))
        (folder / "choosing").rename(folder / "port")
    return text_of(folder / "port")


def text_of(file: Path) -> str:
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def time_into(spent: list[float], holder: Any, name: str) -> None:
    function = getattr(holder, name)

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent.append(time.perf_counter() - start)

    setattr(holder, name, timed)
