"""The worker process of SuperOffload: its faults, its end, the memory it needs."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from processes import python

pytestmark = pytest.mark.skipif(
    Version(version("deepspeed")) < Version("0.18.0"), reason="it has no SuperOffload"
)

# A program without a __main__ guard, as users write it.
BEGIN = """
import os, signal, sys, threading, time
sys.path[:0] = [{tests!r}]
import zerofix
import torch, deepspeed
from superoffload import Scenario, build_model, build_optimizer, configuration, prepare_accelerator

torch.set_num_threads(1)
prepare_accelerator()
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
scenario = Scenario(groups=2)

def start():
    model = build_model(scenario)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(scenario, model),
        config=configuration(scenario, super_offload=True),
    )
    return engine, engine.optimizer.superoffload_cpu_optimizer

def step(engine):
    engine.backward(engine(torch.ones(4, 12, dtype=torch.bfloat16), True))
    engine.step()

def fails(engine):
    begin = time.monotonic()
    try:
        step(engine)
    except RuntimeError as error:
        print("FAILED", time.monotonic() - begin < 1, error, flush=True)
    else:
        print("WENT ON", flush=True)
    os._exit(0)
"""


def run(program: str, **variables: str) -> str:
    """What a program prints that ends well."""
    begin = BEGIN.format(tests=str(Path(__file__).parent.parent))
    done = python(begin + program, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_killed_worker_is_noticed_at_once_with_its_exit_code() -> None:
    output = run(
        """
engine, speculation = start()
step(engine)
os.kill(speculation._client.pid, signal.SIGKILL)
fails(engine)
"""
    )
    assert "FAILED True the worker process of SuperOffload" in output
    assert "ended with exit code -9" in output


def test_an_exception_in_the_worker_is_told() -> None:
    output = run(
        """
engine, speculation = start()
step(engine)
engine.optimizer.optimizer.param_groups[0]["lr"] = "fast"
fails(engine)
"""
    )
    assert "FAILED" in output
    assert "TypeError" in output


def test_a_slow_worker_is_waited_for() -> None:
    output = run(
        """
engine, speculation = start()
step(engine)
os.kill(speculation._client.pid, signal.SIGSTOP)
threading.Timer(5, os.kill, (speculation._client.pid, signal.SIGCONT)).start()
fails(engine)
"""
    )
    assert "WENT ON" in output


def test_destroy_ends_the_worker_and_gives_the_cores_back() -> None:
    output = run(
        """
everything = set(range(10))
now = dict.fromkeys([0, os.getpid()], everything)
os.sched_getaffinity = lambda who: now.get(who, everything)
def set_affinity(who, cores):
    now.update(dict.fromkeys([0, os.getpid()] if who in (0, os.getpid()) else [who], set(cores)))
os.sched_setaffinity = set_affinity

engine, speculation = start()
pid = speculation._client.pid
print(sorted(now[0]), sorted(now[pid]))
step(engine)
before = [weights.clone() for weights in engine.optimizer.fp32_partitioned_groups_flat]
engine.destroy()
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("ENDED")
print(now[0] == everything)
print(all(map(torch.equal, before, engine.optimizer.fp32_partitioned_groups_flat)))
"""
    )
    assert output.splitlines()[-4:] == ["[0] [1, 2, 3, 4, 5, 6, 7, 8, 9]", "ENDED", "True", "True"]


def test_the_worker_ends_with_the_training_process() -> None:
    output = run(
        """
engine, speculation = start()
step(engine)
print(speculation._client.pid, flush=True)
os._exit(0)
"""
    )
    worker = Path("/proc", output.splitlines()[-1])
    end = time.monotonic() + 10
    while worker.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not worker.exists()


def test_without_the_memory_it_steps_as_plain_offload_and_says_so() -> None:
    output = run(
        """
import logging
from zerofix.superoffload import speculation as module
from deepspeed.utils import logger

module.available = lambda: 1000
said = []
logger.addFilter(lambda record: said.append(record.getMessage()) or True)
engine, speculation = start()
step(engine)
print(speculation.obstacle)
print(any("as plain offload does" in text for text in said))
print(hasattr(speculation, "_client"))
"""
    )
    lines = output.splitlines()
    assert lines[-3].startswith("it needs 0.0 GiB of host memory")
    assert lines[-2:] == ["True", "False"]
