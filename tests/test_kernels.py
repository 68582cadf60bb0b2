"""`zerofix.kernels` without a GPU: by torch, in Triton's interpreter, and compiled."""

import functools
import re
import subprocess
import sys
import time

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import FLOATS, SCALES, case, check, layouts
from packaging.version import Version
from processes import ROOT, answer, environment, python
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import zerofix.kernels.pack as module
from zerofix.kernels import pointer_table
from zerofix.kernels.pack import pack
from zerofix.settings import SettingsError

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(layouts((*FLOATS, torch.float64)), SCALES, SEEDS)
def test_torch_copies_every_layout_to_the_bit(drawn, scale, seed):
    drawn_case = case(drawn, scale, seed)
    pack(drawn_case.sources, drawn_case.destinations, scale)
    check(drawn_case)


INTERPRETED = """
import json
from hypothesis import given, settings, strategies as st
from layouts import SCALES, case, check, layouts
from zerofix.kernels import pointer_table
from zerofix.kernels.pack import pack

launches, launch = [], pointer_table.launch
def counted(*arguments):
    launches.append(len(arguments[0]))
    launch(*arguments)
pointer_table.launch = counted

@settings(max_examples=40, deadline=None, database=None)
@given(layouts(), SCALES, st.integers(0, 2**32 - 1))
def test(drawn, scale, seed):
    drawn_case = case(drawn, scale, seed, subnormals=False)
    pack(drawn_case.sources, drawn_case.destinations, scale)
    check(drawn_case, ulps=1)
test()

import torch
far = 2**31 // 2 + 5
room, bucket = (torch.empty(far + 5000, dtype=torch.bfloat16) for _ in range(2))
sources = [room[far:][:3001], room[far + 3001:][:999]]
for source in sources:
    source.copy_(torch.randn(len(source)))
bucket[far - 2:] = 7.5
pack(sources, [bucket[far + 1:][:3001], bucket[far + 3002:][:999]])
expected = torch.full((5002,), 7.5, dtype=torch.bfloat16)
expected[3:4003] = torch.cat(sources)
print(json.dumps([sum(launches), torch.equal(bucket[far - 2:], expected)]))
"""


@pytest.mark.skipif(Version(triton.__version__) < module._OLDEST_TRITON, reason="torch copies")
def test_the_kernel_copies_every_layout_and_far_offsets_in_the_interpreter():
    """To the bit but for what is rounded: the interpreter truncates where it should round to
    nearest. Subnormals are left to the GPU: the interpreter casts 1e-39 to 4e-39."""
    chosen = {"TRITON_INTERPRET": "1", "ZEROFIX_BUCKET_COPY": "triton"}
    launches, far = answer(INTERPRETED, path=ROOT / "tests", **chosen)
    assert launches > 40
    assert far


TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "cubin", "ptx"),
    "sm_90": (GPUTarget("cuda", 90, 32), "cubin", "ptx"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "hsaco", "amdgcn"),
}
# 16 bytes at once, on both ends.
VECTORS = {
    "ptx": (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"),
    "amdgcn": (r"(buffer|global)_load_dwordx4", r"(buffer|global)_store_dwordx4"),
}


@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.3"), reason="it is asked to compile in another way"
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "destination", "scaled"),
    [
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float32, torch.float32, False),
        (torch.float16, torch.float16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, False),
        (torch.bfloat16, torch.float32, True),
    ],
)
def test_the_kernel_compiles_for_gpus_with_vector_loads_and_stores(
    target, source, destination, scaled, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = pointer_table.constants(source, destination, scaled)
    signature = {"table": "*i64", "scale": "fp32"} | dict.fromkeys(types, "constexpr")
    gpu, binary, assembly = TARGETS[target]
    kernel = ASTSource(pointer_table.kernel, signature, types, {(0,): [["tt.divisibility", 16]]})
    compiled = triton.compile(kernel, target=gpu).asm
    assert compiled[binary].startswith(b"\x7fELF")
    for instruction in VECTORS[assembly]:
        assert re.search(instruction, compiled[assembly])


def test_a_table_has_whole_addresses_and_one_row_a_chunk():
    room = torch.empty(10_003, dtype=torch.bfloat16)
    bucket = torch.empty(20_000, dtype=torch.float32)

    sources = [room[:10_000], room[:0], room[3:][:5], room[:2048], room[1:][:2048]]
    places = [(0, 10_000), (10_000, 0), (10_000, 5), (10_005, 2048), (12_056, 2048)]
    destinations = [bucket[place:][:size] for place, size in places]
    start, to = room.data_ptr(), bucket.data_ptr()
    assert start % 16 == to % 16 == 0
    assert pointer_table.table(sources, destinations).tolist() == [
        [start, to, 4096, 4096],
        [start + 2 * 4096, to + 4 * 4096, 4096, 4096],
        [start + 2 * 8192, to + 4 * 8192, 1808, 0],
        [start + 2 * 3, to + 4 * 10_000, 5, 0],
        # Vectors need both ends aligned.
        [start, to + 4 * 10_005, 2048, 0],
        [start + 2, to + 4 * 12_056, 2048, 0],
    ]


def test_the_table_of_a_large_model_stays_small():
    one = torch.empty(1).expand(2**31)  # addresses are all that is asked of it
    assert len(pointer_table.table([one], [one])) == 16384


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append((operation, args))
        return operation(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_operation_that_writes_the_destinations():
    source, destination = torch.ones(4), torch.zeros(4)
    with Seen() as seen:
        pack([source], [destination], 3.0)
    ((operation, arguments),) = seen.operations
    assert operation is torch.ops.zerofix.pack.default
    assert arguments[0][0] is source
    assert arguments[1][0] is destination
    writes = [
        a.alias_info is not None and a.alias_info.is_write for a in operation._schema.arguments
    ]
    assert writes == [False, True, False]
    assert destination.tolist() == [3.0] * 4


def test_the_operator_is_registered_as_torch_wants_it():
    arguments = ([torch.ones(4)], [torch.zeros(4)], None)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if Version(torch.__version__) >= Version("2.5"):  # before, it knew no operator that writes
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.zerofix.pack.default, arguments, test_utils=tests)


def test_compiled_code_may_pack():
    @torch.compile(backend="eager", fullgraph=True)
    def after(source, destination):
        pack([source], [destination])
        return destination + 1

    assert after(torch.full((3,), 5.0), torch.zeros(3)).tolist() == [6.0] * 3


def test_autograd_does_not_see_the_copies():
    bucket = torch.zeros(4)
    pack([torch.ones(2, requires_grad=True) * 2], [bucket[:2]])
    assert not bucket.requires_grad
    assert bucket.tolist() == [2, 2, 0, 0]


def test_a_lazily_negated_source_is_copied_as_what_it_reads():
    source = torch.complex(torch.ones(1), torch.full((1,), 3.0)).conj().imag
    assert source.is_neg()
    assert source.is_contiguous()
    destination = torch.zeros(1)
    pack([source], [destination])
    assert destination.tolist() == [-3.0]


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([torch.ones(2)], [], "1 sources for 0 destinations"),
        ([torch.ones(1)], [torch.ones(2)], "destination 0 has 2 elements, its source 1"),
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(4)[::2]], "destination 1 .* contiguous"),
        ([torch.ones(2, 2)], [torch.ones(2, 2)], "of one dimension"),
    ],
)
def test_what_does_not_fit_is_an_error(sources, destinations, message):
    with pytest.raises(ValueError, match=message):
        pack(sources, destinations)


def test_auto_and_torch_need_no_gpu(monkeypatch):
    for value in ("auto", "torch", ""):
        monkeypatch.setenv("ZEROFIX_BUCKET_COPY", value)
        assert module._way([torch.ones(2)], [torch.ones(2)], None) is module._by_torch


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("3.2.0", "needs Triton 3.2 and tensors on a GPU; the tensors are on cpu"),
        ("3.1.0", "Triton 3.1.0 is older than 3.2"),
        (None, "cannot be imported"),
    ],
)
def test_triton_where_it_cannot_run_is_an_error_that_says_why(version, why, monkeypatch):
    monkeypatch.setenv("ZEROFIX_BUCKET_COPY", "triton")
    if version:
        monkeypatch.setattr(triton, "__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    module._why_no_triton.cache_clear()
    with pytest.raises(SettingsError, match=why):
        pack([torch.ones(2)], [torch.ones(2)])
    module._why_no_triton.cache_clear()


@pytest.fixture
def ways(monkeypatch):
    """What `auto` times, by ways that take as long as told; and how often each ran."""
    seconds, runs = {}, {"triton": 0, "torch": 0}

    def way(name):
        def run(*_):
            runs[name] += 1
            if seconds[name] is None:
                raise RuntimeError("no C compiler")
            time.sleep(seconds[name])

        return run

    class Stream:
        def synchronize(self):
            pass

    monkeypatch.setattr(module, "_by_triton", way("triton"))
    monkeypatch.setattr(module, "_by_torch", way("torch"))
    monkeypatch.setattr(module, "_triton_wins", {})
    monkeypatch.setattr(module, "_triton_fails", False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return seconds, runs


@pytest.mark.parametrize(
    ("triton_takes", "torch_takes", "wins"), [(0.001, 0.05, True), (0.05, 0.001, False)]
)
def test_auto_measures_once_and_takes_the_faster(triton_takes, torch_takes, wins, ways):
    seconds, runs = ways
    seconds.update(triton=triton_takes, torch=torch_takes)
    tensors = [torch.ones(100)] * 10
    assert module._triton_is_faster(tensors, tensors, None) is wins
    measured = dict(runs)
    seconds.update(triton=torch_takes, torch=triton_takes)
    assert module._triton_is_faster(tensors[:9], tensors[:9], None) is wins
    assert runs == measured
    assert module._triton_is_faster(tensors * 9, tensors * 9, None) is not wins


def test_auto_is_torch_where_the_kernel_does_not_compile(ways):
    seconds, runs = ways
    seconds.update(triton=None, torch=0.0)
    tensors = [torch.ones(100)] * 10
    with pytest.warns(UserWarning, match="no C compiler") as warned:
        assert not any(module._triton_is_faster(tensors * n, tensors * n, None) for n in (1, 1, 9))
    assert len(warned) == 1
    assert runs["triton"] == 1


def test_auto_is_torch_where_the_kernel_copies_something_else(ways, monkeypatch):
    seconds, _ = ways
    seconds.update(triton=0.0, torch=0.0)
    destination = torch.zeros(3)
    monkeypatch.setattr(module, "_by_triton", lambda *_: destination.fill_(1))
    monkeypatch.setattr(module, "_by_torch", lambda *_: destination.fill_(2))
    with pytest.warns(UserWarning, match="its copies differ"):
        assert not module._triton_is_faster([destination], [destination], None)
    assert destination.tolist() == [2.0] * 3


def test_pack_and_the_import_of_zerofix_need_no_triton():
    program = """
    import sys
    sys.modules["triton"] = None
    import zerofix
    assert not {"torch", "zerofix.kernels"} & set(sys.modules)
    import torch, zerofix.kernels
    from zerofix.kernels.pack import pack
    from zerofix.kernels.pending import Pending
    bucket = torch.zeros(3)
    pack([torch.ones(2)], [bucket[1:]])
    print(bucket.tolist())
    """
    done = python(program, ZEROFIX_LOG="quiet")
    assert done.stdout == "[0.0, 1.0, 1.0]\n", done.stderr


def test_the_benchmark_runs_on_a_cpu_and_says_what_it_needs():
    """All of the script but the GPU: each way fills the bucket, goals are judged."""
    script = ROOT / "benchmarks" / "bucket_copy.py"
    environ = environment(ZEROFIX_LOG="quiet", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    run = functools.partial(
        subprocess.run, env=environ, capture_output=True, text=True, timeout=120
    )
    tried = run([sys.executable, script, "--device", "cpu", "--scale", "0.0002"])
    assert tried.returncode == 0, tried.stderr
    assert "goal 0.9" in tried.stdout
    assert tried.stdout.endswith("nothing is written\n")
    refused = run([sys.executable, script])
    assert refused.returncode == 1
    assert "needs a GPU" in refused.stderr
