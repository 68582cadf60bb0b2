"""All ranks run the same fixes, or training does not start."""

import functools
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from processes import environment
from rank_engines import engines
from test_launch import script

from zerofix import ranks


def test_equal_ranks_make_engines_and_the_check_takes_less_than_20_ms():
    told, logs = engines(count=2)
    assert [rank["engines"] for rank in told] == [2, 2], logs
    # Of the second engine, only whether it is the first.
    assert [len(rank["spent"]) for rank in told] == [4, 4]
    # The rank that comes first waits for the other, here as in the construction itself.
    assert min(sum(rank["spent"]) for rank in told) < 0.020, told


@pytest.mark.parametrize(
    ("toggle", "value", "difference"),
    [
        ("ZEROFIX_AVERAGE_TENSOR", "0", "average_tensor: applied on rank 0; disabled on rank 1"),
        ("ZEROFIX_REDUCTION_ORDER", "1", "ZEROFIX_REDUCTION_ORDER: not 1 on rank 0; 1 on rank 1"),
    ],
)
def test_a_toggle_on_one_rank_is_an_error_on_both(toggle, value, difference):
    told, _ = engines(one={"environ": {toggle: value}})
    for rank in told:
        assert rank["engines"] == 0
        assert rank["seconds"] < 30
        assert rank["error"].startswith("RanksDifferError: zerofix: the ranks do not run the same")
        assert f"\n  {difference}\n" in rank["error"]


def test_another_deepspeed_on_one_rank_is_an_error_before_any_collective():
    told, _ = engines(zero={"version": "0.18.99"})
    for rank in told:
        assert rank["engines"] == 0
        assert "DeepSpeed: 0.18.99 on rank 0; " in rank["error"]
    assert all(rank["seconds"] < ranks.WAIT for rank in told)


def test_a_rank_without_zerofix_is_an_error():
    (zero, one), _ = engines(one={"zerofix": False}, wait=1)
    assert one["engines"] == 1
    assert zero["engines"] == 0
    assert "no zerofix on rank 1: it is not imported there" in zero["error"]


def test_a_rank_0_without_zerofix_is_an_error_on_the_others():
    (_, one), _ = engines(zero={"environ": {"ZEROFIX": "0"}}, wait=0.5, grace=0.2)
    assert one["engines"] == 0
    assert "no zerofix on rank 0: it is not imported there" in one["error"]


def test_no_rank_waits_for_30_s():
    rank_0 = 2 * ranks.WAIT + ranks.GRACE
    assert rank_0 < 2 * (ranks.WAIT + ranks.GRACE) < 30


def test_to_warn_is_to_train_all_the_same_and_off_is_silent():
    warn, off = ({"environ": {"ZEROFIX_RANK_CHECK": value}} for value in ("warn", "off"))
    told, logs = engines(
        zero={**warn}, one={"environ": {**warn["environ"], "ZEROFIX_COPY_GRADS": "0"}}
    )
    assert [rank["engines"] for rank in told] == [1, 1]
    assert logs[0].count("zerofix: the ranks do not run the same code:") == 1
    assert "the ranks" not in logs[1]
    told, logs = engines(zero=off, one={"environ": {**off["environ"], "ZEROFIX_COPY_GRADS": "0"}})
    assert [rank["engines"] for rank in told] == [1, 1]
    assert [rank["spent"] for rank in told] == [[], []]
    assert "the ranks" not in "".join(logs)


def test_a_rank_that_comes_much_later_is_waited_for_as_by_deepspeed():
    told, logs = engines(wait=0.2, grace=0.1, one={"sleep": 2})
    assert [rank["engines"] for rank in told] == [1, 1], logs


@pytest.mark.parametrize("wraps", [True, False])
def test_the_guard_is_taken_away_unless_somebody_has_patched_over_it(wraps):
    class Engine:
        def __init__(self): ...

    def theirs(self): ...

    stock = Engine.__init__
    ranks.guard(Engine, dict, None, None)
    guarded = Engine.__init__
    ranks.guard(Engine, dict, None, None)
    assert Engine.__init__ is guarded is not stock
    if wraps:
        functools.update_wrapper(theirs, guarded)
    Engine.__init__ = theirs
    ranks.unguard(Engine)
    assert Engine.__init__ is theirs
    Engine.__init__ = guarded
    ranks.unguard(Engine)
    assert Engine.__init__ is stock


def test_ranks_that_cannot_be_compared_train_and_say_so(monkeypatch):
    class Engine:
        def __init__(self):
            self.trains = True

    def failing(digest):
        raise LookupError("no store")

    said = []
    monkeypatch.setattr(ranks, "_check_of_this_process", failing)
    ranks.guard(Engine, dict, None, said.append)
    assert Engine().trains
    assert said == ["zerofix: the ranks are not compared: no store"]


# Other launchers and stores. What they change is the store, which needs no real engine: this one
# has a broadcast as the only collective of its construction.

PROGRAM = """
import os, sys, threading, time
import torch.distributed as dist
from zerofix import ranks

class Engine:
    def __init__(self):
        import torch
        dist.broadcast(torch.zeros(1), 0)

def report(text, rank_0_knows): raise RuntimeError(text)

ranks.WAIT, ranks.GRACE = 5.0, 5.0
restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
own = "0"
if len(sys.argv) > 1 and [restart, os.environ["RANK"]] == sys.argv[1:]: own = "1"
dist.init_process_group("gloo")
ranks.guard(Engine, lambda: {"fix": own}, report, report)
try:
    Engine()
    said = "same"
except RuntimeError as error:
    said = str(error).splitlines()[1].strip()
os.write(1, f"{restart} {os.environ['RANK']} {said}\\n".encode())
if restart == "0" and "--max-restarts=1" in os.environ.get("LAUNCHER", ""): sys.exit(3)
dist.barrier() if said == "same" else time.sleep(1)
"""


@pytest.fixture
def torchrun(tmp_path):
    """Starts torchrun with these options, once a node; returns what all ranks said, sorted."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def launch(*options, nodes=1, arguments=(), **variables):
        command = [script("torchrun"), *options, str(tmp_path / "train.py"), *arguments]
        launchers = [
            subprocess.Popen(
                command,
                env=environment(LAUNCHER=" ".join(options), OMP_NUM_THREADS="1", **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(nodes)
        ]
        try:
            told = [launcher.communicate(timeout=60) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.terminate()
        assert all(launcher.returncode == 0 for launcher in launchers), told
        return sorted(line for out, _ in told for line in out.splitlines())

    return launch


def compare(store, digests, late=None):
    """What each rank says of these digests, one a rank, of which one may come late."""
    said = {}
    construction = threading.Barrier(len(digests))

    def rank(number):
        if number == late:
            time.sleep(3 * ranks.WAIT)
        check = ranks.Check(store, number, len(digests), {"fix": digests[number]})
        said[number] = check.before()
        construction.wait()
        said[number] = said[number] or check.after()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(digests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [said[number] for number in range(len(digests))]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_is_left_of_an_earlier_start_is_no_difference(late, monkeypatch):
    """In a store that is kept, where the starts are not even counted."""
    monkeypatch.setattr(ranks, "WAIT", 0.2)
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    store = torch.distributed.HashStore()
    for who in (None, late, None, late):
        assert compare(store, "aaa", who) == ["", "", ""]


class Counting:
    def __init__(self):
        self.store, self.requests = torch.distributed.HashStore(), 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("world_size", [2, 32])
def test_a_rank_more_is_a_few_requests_more(world_size):
    store = Counting()
    assert set(compare(store, "a" * world_size)) == {""}
    assert store.requests == 5 + 3 * (world_size - 1)


def test_what_is_said_of_ranks_that_differ():
    digests = {rank: {"DeepSpeed": "1", "a": "applied", "b": "applied"} for rank in range(6)}
    assert ranks.differences(digests, range(6)) == ""
    digests[2] = digests[2] | {"a": "pending"}  # it comes with its module
    assert ranks.differences(digests, range(6)) == ""
    digests[4] = {"DeepSpeed": "2", "a": "disabled"}
    del digests[5]
    assert ranks.differences(digests, range(6)).splitlines()[1:-1] == [
        "  DeepSpeed: 1 on ranks 0-3; 2 on rank 4",
        "  a: applied on ranks 0-1, 3; pending on rank 2; disabled on rank 4",
        "  b: applied on ranks 0-3; not known on rank 4",
        "  no zerofix on rank 5: it is not imported there before deepspeed.initialize, or turned "
        "off (ZEROFIX=0 or ZEROFIX_RANK_CHECK=off)",
    ]


def test_torchrun_with_2_nodes_of_2_ranks(torchrun):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        end = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=1", end)
    assert torchrun(*options, nodes=2, arguments=("0", "2")) == [
        f"0 {rank} fix: 0 on ranks 0-1, 3; 1 on rank 2" for rank in range(4)
    ]


def test_an_elastic_restart_compares_again(torchrun):
    """The ranks of the first attempt agree, those of the second do not."""
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    # Without it gloo meets the addresses of before the restart.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert torchrun(*options, arguments=("1", "1"), **variables) == [
        "0 0 same",
        "0 1 same",
        "1 0 fix: 0 on rank 0; 1 on rank 1",
        "1 1 fix: 0 on rank 0; 1 on rank 1",
    ]


MPI_PROGRAM = """
import os, socket
import zerofix, deepspeed, torch
from mpi4py import MPI
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
with socket.socket() as free:
    free.bind(("", 0))
    port = MPI.COMM_WORLD.bcast(free.getsockname()[1])
deepspeed.init_distributed("gloo", distributed_port=port)
try:
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2})
    said = "same"
except zerofix.RanksDifferError as error:
    said = str(error).splitlines()[1].strip()
os.write(1, f"told {torch.distributed.get_rank()} {said}\\n".encode())
"""


def test_ranks_that_mpi_starts(tmp_path):
    """Without any of the variables of a launcher: DeepSpeed asks MPI."""
    (tmp_path / "train.py").write_text(MPI_PROGRAM)
    program = [sys.executable, str(tmp_path / "train.py")]
    other = ["env", "ZEROFIX_AVERAGE_TENSOR=0", *program]
    done = subprocess.run(
        [script("mpiexec"), "-n", "1", *program, ":", "-n", "1", *other],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("told")) == [
        f"told {rank} average_tensor: applied on rank 0; disabled on rank 1" for rank in range(2)
    ], done.stderr
    assert "Exception ignored" not in done.stderr
