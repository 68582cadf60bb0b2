"""`zerofix audit`: which defects a training meets, from version and configuration alone."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from click.testing import CliRunner
from packaging.version import Version
from processes import environment
from releases.test_copy_grads import SCENARIOS, stock_is_wrong

from zerofix.audit import audit
from zerofix.cli import main
from zerofix.config import ConfigError, Source, Training, read
from zerofix.gate import has_defect
from zerofix.patches import CATALOGUE

CPU = {"device": "cpu"}
ADAM = {"optimizer": {"type": "AdamW"}}


def zero(stage, **more):
    return {"train_batch_size": 8, "zero_optimization": {"stage": stage, **more}}


OFFLOAD = zero(2, offload_optimizer=CPU)
NVME = {"device": "nvme"}
SUPER = CPU | {"super_offload": True}
ABSENT = "if a parameter has no gradient in some micro-batch"
DIFFERENT = "if ranks use different parameters in a micro-batch"
STREAMS = "if gradients come from several streams, as under torch.compile"
BUCKETS = "if the gradients are more than one bucket holds (reduce_bucket_size), on a GPU"
RESUMED = "it is resumed from a checkpoint, or has parameter groups of different betas"

BF16, FP16 = ({name: {"enabled": True}} for name in ("bf16", "fp16"))
SUMS = {"data_types": {"grad_accum_dtype": "float32"}}
HALVES = {"grad_accum_dtype": "half"}
RANKS = "with several ranks"

# Fix to release, configurations that meet the defect with what is said of them (True where it is
# certain), and configurations that do not.
EXAMPLES = {
    "grad_accum_dtype": (
        "0.19.7",
        [
            (zero(1) | FP16 | SUMS, RANKS),
            (zero(1, offload_optimizer=CPU) | BF16 | SUMS, RANKS),
            (zero(1, offload_optimizer=CPU) | BF16 | {"data_types": HALVES}, RANKS),
            (zero(1, cpu_offload=True) | {"bfloat16": {"enabled": True}} | SUMS, RANKS),
        ],
        [
            zero(1) | FP16,
            zero(1) | SUMS,
            zero(1) | BF16 | SUMS,
            zero(1) | BF16 | {"data_types": {"grad_accum_dtype": "torch.bfloat16"}},
            zero(1, offload_optimizer=NVME) | BF16 | SUMS,
            zero(2) | FP16 | SUMS,
        ],
    ),
    "bf16_optimizer": (
        "0.18.9",
        [(zero(1) | BF16 | SUMS, RANKS), (zero(1, offload_optimizer=NVME) | BF16 | SUMS, RANKS)],
        [
            zero(0) | BF16,
            zero(1) | BF16,
            zero(1) | {"bf16": BF16["bf16"] | {"immediate_grad_update": True}} | SUMS,
            zero(1) | FP16 | SUMS,
            zero(1, offload_optimizer=CPU) | BF16 | SUMS,
        ],
    ),
    "copy_grads": (
        "0.18.9",
        [
            (OFFLOAD | {"gradient_accumulation_steps": 3}, True),
            (
                OFFLOAD | {"gradient_accumulation_steps": 2},
                "if a step has 3 or more backwards, by set_gradient_accumulation_boundary",
            ),
            (
                zero(2, cpu_offload=True),
                "if a step has 2 or more backwards, by set_gradient_accumulation_boundary",
            ),
        ],
        [zero(1, offload_optimizer=CPU) | {"gradient_accumulation_steps": 3}, zero(2)],
    ),
    "grad_accumulation": (
        "0.18.2",
        [
            (zero(2) | {"gradient_accumulation_steps": 2}, True),
            (zero(2), "if a step has several backwards, by set_gradient_accumulation_boundary"),
        ],
        [zero(1) | {"gradient_accumulation_steps": 2}, OFFLOAD, {"train_batch_size": 8}],
    ),
    "cpu_adam": (
        "0.18.9",
        [(OFFLOAD | ADAM, True), (OFFLOAD, "if the optimizer is DeepSpeedCPUAdam")],
        [
            zero(2) | ADAM,
            zero(0, offload_optimizer=CPU) | ADAM,
            OFFLOAD | {"optimizer": {"type": "Lion"}},
            OFFLOAD | {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
        ],
    ),
    "cpu_adam_resume": (
        "0.19.8",
        [
            (zero(3, offload_optimizer=CPU) | ADAM, f"if {RESUMED}"),
            (OFFLOAD, f"if the optimizer is DeepSpeedCPUAdam, and {RESUMED}"),
        ],
        [zero(3) | ADAM],
    ),
    "average_tensor": ("0.19.8", [(zero(1), STREAMS), (zero(2), STREAMS)], [zero(3), OFFLOAD]),
    "grad_lifetime": (
        "0.18.9",
        [
            (OFFLOAD, STREAMS),
            (
                zero(1, overlap_comm=True),
                f"{STREAMS}, or a parameter is larger than reduce_bucket_size, on a GPU",
            ),
        ],
        [zero(0), zero(3)],
    ),
    "bucket_index": ("0.17.4", [(zero(1, overlap_comm=True), BUCKETS)], [zero(2), zero(3)]),
    "bucket_overlap": ("0.17.5", [(zero(2, overlap_comm=True), BUCKETS)], [zero(2), zero(3)]),
    "superoffload": ("0.18.8", [(zero(3, offload_optimizer=SUPER), True)], [zero(3), OFFLOAD]),
    "superoffload_step": ("0.19.8", [(zero(3, offload_optimizer=SUPER), True)], [zero(3), OFFLOAD]),
    "absent_grads": (
        "0.19.8",
        [
            (OFFLOAD, f"{ABSENT} or step"),
            (
                zero(1, overlap_comm=True) | {"gradient_accumulation_steps": 2},
                "if a parameter has no gradient in the last micro-batch of a step, "
                "with several ranks",
            ),
            (zero(1) | BF16 | SUMS, "if ranks use different parameters in a step"),
        ],
        [zero(1), zero(2), zero(1, overlap_comm=True), zero(3)],
    ),
    "absent_grads_zero3": ("0.19.8", [(zero(3), f"{ABSENT} or step")], [OFFLOAD]),
    "reduction_order": (
        "0.19.8",
        [(zero(1), DIFFERENT), (zero(2), DIFFERENT)],
        [zero(0), zero(3)],
    ),
    "zero_grad": (
        "0.19.8",
        [
            (config, "if engine.zero_grad() is to throw a backward away")
            for config in (zero(2), zero(3), zero(1) | BF16 | SUMS)
        ],
        [zero(0), zero(1)],
    ),
    "no_sync": (
        "0.19.8",
        [(zero(1, overlap_comm=True), "if engine.no_sync() is used")],
        [zero(1), zero(2, overlap_comm=True)],
    ),
    "autocast_scaler": (
        "0.19.8",
        [(zero(2) | {"torch_autocast": {"enabled": True, "dtype": "float16"}}, True)],
        [
            zero(2) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            zero(2) | {"torch_autocast": {"enabled": False, "dtype": "float16"}},
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        ],
    ),
    "zero3_reduce_stream": ("0.18.7", [(zero(3), STREAMS)], [zero(3, overlap_comm=False), zero(2)]),
}


def training(config, release):
    return Training(config, Version(release), Source("ds_config.json", json.dumps(config)))


def said(config, release):
    """Fix name to True, or to the conditions."""
    return {hit.fix.name: hit.certain or hit.when for hit in audit(training(config, release))}


def test_every_fix_says_which_configurations_meet_its_defect():
    assert {fix.name for fix in CATALOGUE} == EXAMPLES.keys()
    for fix in CATALOGUE:
        release, hit, missed = EXAMPLES[fix.name]
        assert has_defect(fix, release), fix.name
        for config, answer in hit:
            expected = True if answer is True else (answer,)
            assert said(config, release)[fix.name] == expected, (fix.name, config)
        for config in missed:
            assert fix.name not in said(config, release), (fix.name, config)


@pytest.mark.skipif(Version(metadata.version("deepspeed")) >= Version("0.19"), reason="is right")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_audit_agrees_with_what_training_shows(scenario):
    config = zero(scenario.stage, offload_optimizer=CPU)
    config["gradient_accumulation_steps"] = scenario.ga_steps
    answer = said(config, metadata.version("deepspeed")).get("copy_grads")
    wrong = stock_is_wrong(scenario)
    if answer is None or answer is True:
        usual = not scenario.boundary_by_hand
        assert wrong == (answer is True) or (answer is True and not usual)
    else:
        assert wrong == any(n > max(scenario.ga_steps, 1) for n in scenario.backwards)


def test_a_release_without_the_defect_does_not_meet_it():
    config = OFFLOAD | ADAM | {"gradient_accumulation_steps": 4}
    assert set(said(config, "0.18.9")) > {"copy_grads", "cpu_adam"}
    assert set(said(config, "0.19.0")) & {"copy_grads", "cpu_adam"} == set()
    assert said(config, "0.18.9+vendor")["copy_grads"] is True
    assert "grad_accumulation" not in said(zero(2), "0.17.5")


def test_which_releases_take_the_bf16_optimizer():
    def met(config):
        releases = ("0.17.5", "0.17.6", "0.18.4", "0.18.5")
        return [r for r in releases if "zero_grad" in said(config, r)]

    assert met(zero(1) | BF16 | SUMS) == ["0.17.5", "0.18.5"]
    assert met(zero(0) | BF16) == ["0.17.5"]


def test_what_is_auto_is_tried_and_said_where_it_matters():
    """As in a configuration for the Hugging Face Trainer."""
    auto = dict.fromkeys(("train_batch_size", "gradient_clipping"), "auto")
    config = zero(2, overlap_comm="auto", offload_optimizer=CPU, reduce_bucket_size="auto")
    config |= auto | {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": False}}}
    found = said(config, "0.18.4")
    assert found["cpu_adam"] is True
    steps = "with gradient_accumulation_steps ="
    by_hand = "backwards, by set_gradient_accumulation_boundary"
    assert found["copy_grads"] == (
        f"{steps} 1, if a step has 2 or more {by_hand}",
        f"{steps} 2, if a step has 3 or more {by_hand}",
        f"{steps} 3 or more",
    )
    assert found["average_tensor"] == (STREAMS,)
    assert found["bucket_overlap"] == (f"with zero_optimization.overlap_comm = true, {BUCKETS}",)


@pytest.mark.parametrize(
    ("sizes", "answer"),
    [
        ((8, 8), ("if a step has several backwards, by set_gradient_accumulation_boundary",)),
        ((None, 8), ("if a step has several backwards, by set_gradient_accumulation_boundary",)),
        ((16, 8), 2),
        ((64, 8), 3),
        (("auto", "auto"), 3),
    ],
)
def test_accumulation_follows_from_the_batch_sizes(sizes, answer):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size}
    found = said(config | {"zero_optimization": {"stage": 2}}, "0.18.2")["grad_accumulation"]
    # Where the number of ranks decides, each possible number of steps is named.
    assert found == answer or len(found) == answer


# Files


@pytest.fixture
def file(tmp_path):
    def write(text, name="ds_config.json"):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return tmp_path / name

    return write


def test_deepspeeds_own_freedoms_are_read(file):
    text = """{
  # a comment
  train_batch_size: 8,
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",},},
}"""
    assert read(file(text), Version("0.18.4")).offloads_optimizer


ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  zero_stage: 2
distributed_type: DEEPSPEED
"""


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_file_of_accelerate_config_is_read(file, form):
    text = ACCELERATE if form == "yaml" else json.dumps(yaml.safe_load(ACCELERATE))
    hits = audit(read(file(text, f"default_config.{form}"), Version("0.18.4")))
    assert {hit.fix.name: hit.certain for hit in hits}["copy_grads"]


def test_yaml_that_is_none_is_an_error_with_its_line(file):
    path = file("a: 1\nb: [\nc: 2", "default_config.yaml")
    with pytest.raises(ConfigError, match=r"default_config\.yaml:3: not YAML: "):
        read(path, Version("0.18.4"))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{\n "train_batch_size": 8,\n "fp16": [{}}\n}', 3, "not JSON: "),
        ("import torch\n\nx = {1}\n", 3, "not JSON: "),
        ("", 1, "not JSON: "),
        ("[1]", 1, "a configuration is an object, this is [1]"),
        ('{"name": "x"}', 1, "no configuration of DeepSpeed: it has none of bf16, "),
        (
            '{\n "fp16": {},\n "zero_optimization": {\n  "stage": "two"}}',
            4,
            "zero_optimization.stage is 'two'; it takes a number",
        ),
        ('{"zero_optimization":\n{"stage": 7}}', 2, "zero_optimization.stage is 7; it takes 0, 1"),
        (
            '{"fp16": {}, "zero_optimization": {"stage": 1,\n"overlap_comm": "yes"}}',
            2,
            "zero_optimization.overlap_comm is 'yes'; it takes true or false",
        ),
        ('{"fp16": {},\n"fp16": {}}', 1, "fp16 is there twice"),
        ('{\n"deepspeed_config": {"deepspeed_config_file": "a.json"}}', 2, "audit a.json"),
    ],
)
def test_what_is_no_configuration_is_an_error_with_its_line(file, text, line, message):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        audit(read(path, Version("0.17.4")))
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert message in str(error.value)


def test_a_binary_file_is_an_error(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02\xff")
    with pytest.raises(ConfigError, match=r"model\.pt:1: not a text file"):
        read(tmp_path / "model.pt", Version("0.18.4"))


# The command


def run(*arguments):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


@pytest.mark.parametrize(("config", "code"), [(OFFLOAD | ADAM, 1), (zero(1), 3), (zero(0), 0)])
def test_the_exit_code_tells_met_may_be_met_and_not_met(file, config, code):
    assert run(file(config), "--deepspeed", "0.18.4").exit_code == code


def test_the_text_tells_what_since_when_and_what_to_do(file):
    output = run(file(OFFLOAD | {"gradient_accumulation_steps": 4}), "--deepspeed", "0.18.4").output
    text = " ".join(output.split())
    assert "copy_grads is met (before 0.16.0 already, right in 0.19.0)" in text
    assert "trains on part of the batch" in text
    assert "repaired by: import zerofix, or DeepSpeed 0.19.0" in text
    assert (
        f"average_tensor may be met (before 0.16.0 already, right in no release) {STREAMS}" in text
    )


def test_json_has_the_same(file):
    path = file(OFFLOAD | {"gradient_accumulation_steps": 4})
    told = json.loads(run(path, "--deepspeed", "0.18.4", "--json").output)
    assert (told["config"], told["deepspeed"], told["known"]) == (str(path), "0.18.4", True)
    first = told["defects"][0]
    assert (first["name"], first["certain"], first["when"]) == ("copy_grads", True, [])
    assert (first["introduced"], first["fixed"]) == (None, "0.19.0")
    assert {"title", "symptom", "upstream", "limits"} <= first.keys()


def test_a_newer_release_is_judged_as_the_newest_known_and_says_so(file):
    assert "Judged as " in run(file(zero(1)), "--deepspeed", "9.0").output
    assert not json.loads(run(file(zero(1)), "--deepspeed", "9.0", "--json").output)["known"]


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.15.4", "zerofix knows DeepSpeed from 0.16.0 on"), ("new", "'new' is not a version of")],
)
def test_a_version_that_is_not_known_is_an_error(file, version, message):
    result = run(file(zero(1)), "--deepspeed", version)
    assert result.exit_code == 2
    assert message in result.output


def test_neither_deepspeed_nor_torch_is_needed(file, tmp_path):
    for module in ("torch", "deepspeed"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    command = [sys.executable, "-m", "zerofix", "audit", str(file(OFFLOAD | ADAM))]
    done = subprocess.run(
        [*command, "--deepspeed", "0.18.4"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_without_deepspeed_the_version_must_be_said(file, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    result = run(file(zero(1)))
    assert result.exit_code == 2
    assert "DeepSpeed is not installed here: say which with --deepspeed" in result.output
