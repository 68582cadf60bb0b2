"""Reads a DeepSpeed configuration, as far as fixes ask for it. Needs no DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version

T = TypeVar("T", bool, int, float, str)

AUTO = "auto"
_KNOWN = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "optimizer", "fp16", "bf16", "bfloat16"),
    *("gradient_clipping", "deepspeed_config"),
}
"""One of these a configuration has."""


class ConfigError(ValueError):
    """A file that is no configuration of DeepSpeed; the message has its name and line."""


class Unresolved(Exception):
    """A value that the framework chooses (``"auto"``), or the number of ranks decides."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        super().__init__(path)
        self.path = path
        self.values = values
        """What it may become, by what to call it."""


@dataclass(frozen=True)
class Training:
    """What a fix can ask of a training: its configuration and the release of DeepSpeed."""

    config: Mapping[str, Any]
    """As in the file: nested, unset values left out."""
    deepspeed: Version
    source: Source
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values taken for unresolved ones, by path."""

    def get(self, path: str, default: T, auto: Mapping[str, T] | None = None) -> T:
        """The value at a path such as ``"zero_optimization.overlap_comm"``.

        Args:
            default: DeepSpeed's default. It also tells the type.
            auto: what ``"auto"`` may become, by what to call it; true and false for a bool, and
                the default for others.

        Raises:
            ConfigError: the value is of another type.
            Unresolved: it is ``"auto"``; the audit tries what it may become.
        """
        if path in self.chosen:
            chosen: T = self.chosen[path]
            return chosen
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return default
        if value == AUTO and auto is None and not isinstance(default, bool):
            return default
        if value == AUTO:
            raise Unresolved(path, auto or {"true": True, "false": False})
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            name = {bool: "true or false", str: "a string"}.get(type(default), "a number")
            raise ConfigError(f"{self.source.at(path)}: {path} is {value!r}; it takes {name}")
        found: T = type(default)(value)
        return found

    def since(self, release: str) -> bool:
        return self.deepspeed >= Version(release)

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        stage = self.get("zero_optimization.stage", 0, {str(n): n for n in range(4)})
        if stage not in range(4):
            place = self.source.at("zero_optimization.stage")
            raise ConfigError(f"{place}: zero_optimization.stage is {stage}; it takes 0, 1, 2 or 3")
        return stage

    @property
    def dtype(self) -> str:
        """Of the model: fp16, bf16 or fp32."""
        if self.get("fp16.enabled", False):
            return "fp16"
        return "bf16" if self.bf16("enabled") else "fp32"

    def bf16(self, switch: str) -> bool:
        """A switch of bf16, which is off by default."""
        return self.get(f"bf16.{switch}", self.get(f"bfloat16.{switch}", False))

    @property
    def grad_accum_dtype(self) -> str:
        """What gradients are summed in, as ``dtype``."""
        default = self.dtype
        if default == "bf16" and self.stage == 0 and not self.since("0.17.6"):
            default = "fp32"
        name = self.get("data_types.grad_accum_dtype", default).removeprefix("torch.")
        others = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
        return (others | {"float": "fp32", "float32": "fp32"}).get(name, name)

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its BF16_Optimizer: from 0.17.6 to 0.18.4 it never does.

        It is the one for sums in fp32 without ZeRO, and with ZeRO-1 but for offload to a CPU.
        """
        if (self.dtype, self.grad_accum_dtype) != ("bf16", "fp32"):
            return False
        if self.stage == 0:
            return not self.since("0.17.6")
        one = self.stage == 1 and not self.offloads_to_cpu
        return one and (self.since("0.18.5") or not self.since("0.17.6"))

    @property
    def offloads_optimizer(self) -> bool:
        """ZeRO with the optimizer in CPU memory or on NVMe."""
        device = self.get("zero_optimization.offload_optimizer.device", "none")
        return self.stage > 0 and (device != "none" or self.offloads_to_cpu)

    @property
    def offloads_to_cpu(self) -> bool:
        """ZeRO with the optimizer in CPU memory."""
        device = self.get("zero_optimization.offload_optimizer.device", "none")
        old_name = self.get("zero_optimization.cpu_offload", False)
        return self.stage > 0 and (device == "cpu" or old_name)

    @property
    def overlap_comm(self) -> bool:
        return self.get("zero_optimization.overlap_comm", self.stage == 3)

    @property
    def gradient_accumulation_steps(self) -> int:
        path = "gradient_accumulation_steps"
        steps = {"1": 1, "2": 2, "3 or more": 3}
        if path not in self.config and path not in self.chosen:
            names = ("train_batch_size", "train_micro_batch_size_per_gpu")
            sizes = [self.config[name] for name in names if name in self.config]
            batch, micro = (self.get(name, 0) for name in names)
            # DeepSpeed divides the one by the other and by the number of ranks.
            if len(sizes) == 2 and (AUTO in sizes or batch > micro):
                possible = {k: v for k, v in steps.items() if AUTO in sizes or v * micro <= batch}
                raise Unresolved(path, possible)
        return self.get(path, 1, steps)

    @property
    def cpu_adam(self) -> bool | str:
        """Whether DeepSpeedCPUAdam is the optimizer; a string is the condition."""
        if not self.offloads_optimizer:
            return False
        name = self.get("optimizer.type", "").lower()
        if not name:
            return "if the optimizer is DeepSpeedCPUAdam"
        return name in ("adam", "adamw") and not self.get("optimizer.params.torch_adam", False)


@dataclass(frozen=True)
class Source:
    """The text of a configuration, for messages."""

    name: str
    text: str

    def at(self, path: str) -> str:
        """``file:line`` of a path: where its last key follows the others."""
        place = 0
        for key in path.split("."):
            match = re.compile(rf"""["']?\b{re.escape(key)}\b["']?\s*:""").search(self.text, place)
            place = match.start() if match else place
        return f"{self.name}:{self.text.count(chr(10), 0, place) + 1}"


def read(file: Path, deepspeed: Version) -> Training:
    """Read a configuration of DeepSpeed, or one of ``accelerate config``.

    JSON, and what DeepSpeed takes besides (Hjson: comments, trailing commas) where hjson is
    installed; for Accelerate also YAML where PyYAML is.

    Raises:
        ConfigError: it is neither; the message has the line.
    """
    try:
        source = Source(str(file), file.read_text())
    except UnicodeDecodeError:
        raise ConfigError(f"{file}:1: not a text file") from None
    config = _parse(source)
    if "deepspeed_config" in config:
        config = _of_accelerate(config["deepspeed_config"], source)
    return Training(config, deepspeed, source)


def _parse(source: Source) -> Mapping[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(
                    f"{source.at(key)}: {key} is there twice, which DeepSpeed refuses"
                )
        return dict(pairs)

    if source.name.endswith((".yaml", ".yml")):
        config = _parse_yaml(source)
    else:
        try:
            config = json.loads(source.text, object_pairs_hook=once)
        except json.JSONDecodeError as error:
            config = _parse_hjson(source, once, error)
    if not isinstance(config, dict):
        raise ConfigError(f"{source.name}:1: a configuration is an object, this is {config!r:.40}")
    if not _is_config(config):
        known = ", ".join(sorted(_KNOWN))
        raise ConfigError(f"{source.name}:1: no configuration of DeepSpeed: it has none of {known}")
    return config


def _parse_hjson(source: Source, once: Any, error: Any) -> Any:
    """What is no JSON, as DeepSpeed reads it. Hjson takes almost any text: keys must be known."""
    config = None
    try:
        import hjson

        config = hjson.loads(source.text, object_pairs_hook=once)
    except ImportError:
        pass
    except ValueError as other:
        if isinstance(other, ConfigError):
            raise
        error = max(error, other, key=lambda e: int(getattr(e, "lineno", 0)))
    if not _is_config(config):
        raise ConfigError(f"{source.name}:{error.lineno}: not JSON: {error.msg}") from None
    return config


def _parse_yaml(source: Source) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{source.name}:1: to read YAML, install PyYAML") from None
    try:
        return yaml.safe_load(source.text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise ConfigError(f"{source.name}:{line}: not YAML: {error.problem}") from None


def _is_config(config: Any) -> bool:
    return isinstance(config, dict) and bool(_KNOWN & config.keys())


def _of_accelerate(config: Any, source: Source) -> Mapping[str, Any]:
    """The DeepSpeed part of a file of ``accelerate config``, in DeepSpeed's own names."""
    place = source.at("deepspeed_config")
    if not isinstance(config, dict):
        raise ConfigError(f"{place}: deepspeed_config is {config!r}; it takes an object")
    if "deepspeed_config_file" in config:
        name = config["deepspeed_config_file"]
        raise ConfigError(f"{place}: the configuration is in another file; audit {name}")
    found = dict(config)
    zero = {"stage": found.pop("zero_stage", 2)}
    device = found.pop("offload_optimizer_device", None)
    if device:
        zero["offload_optimizer"] = {"device": device}
    return found | {"zero_optimization": zero}
