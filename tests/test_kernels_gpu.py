"""`zerofix.kernels` on a GPU: pytest -m gpu."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import FLOATS, SCALES, case, check, distance, layouts, product
from packaging.version import Version
from processes import ROOT, environment

import zerofix.kernels.pack as module
from zerofix.kernels.pack import pack

pytestmark = pytest.mark.gpu
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def gpu():
    if not torch.cuda.is_available():
        pytest.fail("the tests marked gpu need a GPU that torch.cuda knows")


@pytest.fixture(params=["triton", "torch", "auto"])
def way(request, monkeypatch):
    """The setting, and which of the two ways were taken."""
    monkeypatch.setenv("ZEROFIX_BUCKET_COPY", request.param)
    taken = []
    for name in ("_by_triton", "_by_torch"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, o=original, n=name: (taken.append(n), o(*a))[1]
        )
    return request.param, taken


# The setting stays the same for all examples.
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=layouts((*FLOATS, torch.float64)), scale=SCALES, seed=SEEDS)
def test_every_layout_is_copied_to_the_bit(way, drawn, scale, seed):
    drawn_case = case(drawn, scale, seed, "cuda")
    pack(drawn_case.sources, drawn_case.destinations, scale)
    check(drawn_case)


def test_triton_is_taken_when_it_is_asked_for(way):
    asked, taken = way
    source = torch.randn(5000, device="cuda")
    destination = torch.empty_like(source)
    pack([source], [destination])
    assert torch.equal(source, destination)
    if asked != "auto":
        assert taken == [f"_by_{asked}"]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("destination", FLOATS)
@pytest.mark.parametrize("scale", [None, 1 / 3])
def test_offsets_beyond_two_gibibytes_and_many_chunks(way, source, destination, scale):
    far, size = 2**31 + 5, 40_000_003
    room = torch.empty(far + size, dtype=source, device="cuda")
    bucket = torch.full((far + size + 10,), 7.5, dtype=destination, device="cuda")
    parts = [room[far:][: size - 999], room[far + size - 999 :]]
    for part in parts:
        part.normal_()
    pack(parts, [bucket[far + 3 :][: size - 999], bucket[far + 3 + size - 999 :][:999]], scale)
    expected = torch.full((size + 10,), 7.5, dtype=destination, device="cuda")
    expected[3 : 3 + size] = product(room[far:], destination, scale)
    assert not distance(bucket[far:], expected).any()
    assert bool((bucket[:1000] == 7.5).all())


def test_thousands_of_tensors(way):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 5000, (5000,), generator=generator).tolist()
    sources = [torch.randn(size, device="cuda") for size in sizes]
    bucket = torch.full((sum(sizes),), float("nan"), device="cuda")
    pack(sources, list(bucket.split(sizes)))
    assert torch.equal(bucket, torch.cat(sources))


def test_the_table_outlives_the_launch(way):
    """Tables are freed while their kernels wait: memory that is used again must not be theirs."""
    sources = [torch.full((1000,), float(i), device="cuda") for i in range(200)]
    bucket = torch.zeros(200, 1000, device="cuda")
    pack(sources[:2], list(bucket[:2]))  # compiles, and measures
    torch.cuda.synchronize()
    bucket.zero_()
    torch.cuda._sleep(200_000_000)
    for i in range(0, 200, 2):
        pack(sources[i : i + 2], list(bucket[i : i + 2]))
        torch.full((2, 4), -1, dtype=torch.int64, device="cuda")
        torch.full((2, 4), -1, dtype=torch.int64).pin_memory()
    assert torch.equal(bucket, torch.stack(sources))


def test_copies_run_on_the_current_stream(way):
    side = torch.cuda.Stream()
    source, destination = torch.zeros(5000, device="cuda"), torch.zeros(5000, device="cuda")
    pack([source], [destination])  # compiles, and measures
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        source.fill_(1)
        pack([source], [destination])
    assert not destination.any()  # the default stream does not wait for it
    side.synchronize()
    assert destination.all()


def test_a_captured_graph_replays_the_copies(way):
    source, destination = torch.ones(5000, device="cuda"), torch.zeros(5000, device="cuda")
    pack([source], [destination], 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack([source], [destination], 2.0)
    for value in (1.0, 3.0):
        source.fill_(value)
        graph.replay()
        assert bool((destination == 2 * value).all())


def test_a_destination_elsewhere_is_an_error():
    with pytest.raises(ValueError, match="is on cpu, its source on cuda:0"):
        pack([torch.ones(2, device="cuda")], [torch.ones(2)])


def difference(stage, compiled, **variables):
    """Of weights trained with late gradients to those of one stream; and what was said."""
    command = [sys.executable, str(ROOT / "tests" / "gpu_training.py")]
    command.append(json.dumps({"stage": stage, "compiled": compiled}))
    variables = {"DS_ACCELERATOR": "cuda", "ZEROFIX_LOG": "quiet"} | variables
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("copies", ["torch", "triton", "auto"])
def test_training_with_late_gradients_is_exact(stage, compiled, copies):
    assert difference(stage, compiled, ZEROFIX_BUCKET_COPY=copies)[0] == 0


@pytest.mark.skipif(
    Version(version("deepspeed")) >= Version("0.19.3"), reason="#8061 is closed for overlap_comm"
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stage", [1, 2])
def test_stock_reduces_before_late_gradients_are_there(stage, compiled):
    assert difference(stage, compiled, ZEROFIX="0")[0] > 1e-3


@pytest.mark.parametrize("copies", ["torch", "triton"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_cuda_sanitizer_finds_nothing(stage, copies):
    error, said = difference(stage, False, ZEROFIX_BUCKET_COPY=copies, TORCH_CUDA_SANITIZER="1")
    assert error == 0
    assert "CSAN detected" not in said
