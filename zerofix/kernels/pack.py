"""Copies many tensors into slices of buckets, with cast and scale, in few launches."""

from __future__ import annotations

import functools
import operator
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from zerofix.settings import SettingsError, bucket_copy

_Copy = Callable[[list[Tensor], list[Tensor], float | None], None]

_Group = tuple[torch.dtype, torch.dtype, bool]
"""Of the sources, of the destinations, and whether the sources are contiguous."""
_dtype = operator.attrgetter("dtype")
_TRITON_TYPES = {torch.float32, torch.bfloat16, torch.float16}

_OLDEST_TRITON = Version("3.2")
"""One before it does not compile the kernel: it takes no type for an argument."""
_ROUNDS = 3
"""How often each way is timed before ``auto`` decides."""
_triton_wins: dict[tuple[object, ...], bool] = {}
"""What ``auto`` has found for a kind of list."""
_triton_fails = False
"""``auto`` has seen the kernel not compile, or not run."""

# A plain library operator: torch.library.custom_op costs eight times as much a call. To a
# TorchDispatchMode, as torch.cuda's sanitizer and zerofix.testing are, either is one operation
# that reads the sources and writes the destinations.
_library: Any = torch.library.Library("zerofix", "FRAGMENT")  # type: ignore[no-untyped-call]


def pack(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], scale: float | None = None
) -> None:
    """Copy each source, flattened in row-major order, into its destination.

    With ``scale``, an element becomes its product with ``scale``, computed in fp64 where source
    or destination is fp64 and in fp32 otherwise, and then rounded to the destination's type.
    Without, it is cast as ``Tensor.copy_`` does. The Triton kernel and torch give the same bits,
    except for the payload of a NaN that changes its type.

    The copies run on the current stream, and autograd does not see them. To the dispatcher all of
    it is one operation, ``zerofix::pack``. ``ZEROFIX_BUCKET_COPY`` chooses between Triton and
    torch; see ``docs/kernels.md``.

    Args:
        sources: tensors of any shape and strides, of fp32, bf16, fp16 or fp64, on one device.
        destinations: for each source a contiguous tensor of one dimension, with as many elements,
            on that device, of any of these types. None overlaps another one or a source.
        scale: a factor for all elements.

    Raises:
        ValueError: the lists, or a source and its destination, do not fit each other.
        SettingsError: ``ZEROFIX_BUCKET_COPY=triton`` for tensors that Triton cannot copy, because
            it is not installed or too old, or they are not on a GPU.
    """
    with torch.no_grad():
        torch.ops.zerofix.pack.default(sources, destinations, scale)


def _pack(sources: list[Tensor], destinations: list[Tensor], scale: float | None = None) -> None:
    _check(sources, destinations)
    if not sources:
        return
    # A list costs its time in Python, so what is asked of each tensor is asked by map.
    alike = len(set(map(_dtype, sources))) == len(set(map(_dtype, destinations))) == 1
    if alike and set(map(Tensor.dim, sources)) == {1} and all(map(Tensor.is_contiguous, sources)):
        _way(sources, destinations, scale)(sources, destinations, scale)
        return
    groups: dict[_Group, tuple[list[Tensor], list[Tensor]]] = {}
    for source, destination in zip(sources, destinations, strict=True):
        flat = source.is_contiguous()
        group = groups.setdefault((source.dtype, destination.dtype, flat), ([], []))
        group[0].append(source.view(-1) if flat else source)
        group[1].append(destination if flat else destination.view(source.shape))
    for (_, _, flat), (group_sources, group_destinations) in groups.items():
        way = _way(group_sources, group_destinations, scale) if flat else _by_torch
        way(group_sources, group_destinations, scale)


def _check(sources: list[Tensor], destinations: list[Tensor]) -> None:
    """The kernel gets addresses: what does not fit would be written anywhere."""
    if (
        list(map(Tensor.numel, sources)) == list(map(Tensor.numel, destinations))
        and set(map(Tensor.dim, destinations)) <= {1}
        and all(map(Tensor.is_contiguous, destinations))
        and len(set(map(Tensor.get_device, (*sources, *destinations)))) <= 1
    ):
        return
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.numel() != destination.numel():
            what = f"has {destination.numel()} elements, its source {source.numel()}"
        elif destination.dim() != 1 or not destination.is_contiguous():
            what = (
                f"has shape {tuple(destination.shape)} and strides {destination.stride()}: it must "
                "be contiguous and of one dimension"
            )
        elif not source.device == destination.device == sources[0].device:
            what = f"is on {destination.device}, its source on {source.device}: it must be one"
        else:
            continue
        raise ValueError(f"destination {i} {what}")


if not hasattr(torch.ops.zerofix, "pack"):  # else this module is imported a second time
    _library.define("pack(Tensor[] sources, Tensor(a!)[] destinations, float? scale=None) -> ()")
    _library.impl("pack", _pack, "CompositeExplicitAutograd")
    _library.impl("pack", lambda *_: None, "Meta")  # also for tensors torch.compile traces with


def _by_torch(sources: list[Tensor], destinations: list[Tensor], scale: float | None) -> None:
    if scale is None:
        torch._foreach_copy_(destinations, sources)
        return
    target = destinations[0].dtype
    exact = torch.promote_types(torch.promote_types(sources[0].dtype, target), torch.float32)
    if target == exact:
        products = destinations
    else:
        # Not in place: on a CPU, _foreach_mul_ rounds the factor to bf16 or fp16 first.
        products = [torch.empty_like(source, dtype=exact) for source in sources]
    torch._foreach_copy_(products, sources)
    torch._foreach_mul_(products, scale)
    if products is not destinations:
        torch._foreach_copy_(destinations, products)


def _by_triton(sources: list[Tensor], destinations: list[Tensor], scale: float | None) -> None:
    from zerofix.kernels.pointer_table import launch

    with torch.cuda.device_of(destinations[0]):  # type: ignore[no-untyped-call]
        launch(sources, destinations, scale)


@functools.cache
def _why_no_triton(device: torch.device) -> str:
    """Empty where the kernel can run."""
    try:
        import triton

        version = Version(triton.__version__)
    except Exception as error:  # not installed, broken, or something else of that name
        return f"Triton cannot be imported: {error!r}"
    if version < _OLDEST_TRITON:
        return f"Triton {version} is older than {_OLDEST_TRITON}"
    if device.type == "cuda":
        return ""
    # Its interpreter is how it is tested.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "" if interpreted else f"the tensors are on {device}"


def triton_may_copy(device: torch.device) -> bool:
    """Whether the kernel can run there, and ``ZEROFIX_BUCKET_COPY`` allows it.

    Raises:
        SettingsError: ``ZEROFIX_BUCKET_COPY=triton`` where Triton cannot run.
    """
    asked = bucket_copy()
    if asked == "torch" or (asked == "auto" and (device.type != "cuda" or _triton_fails)):
        return False
    why = _why_no_triton(device)
    if why and asked == "triton":
        raise SettingsError(
            f"ZEROFIX_BUCKET_COPY=triton needs Triton {_OLDEST_TRITON} and tensors on a GPU; "
            f"{why}. Unset it, or set it to auto."
        )
    return not why


def _way(sources: list[Tensor], destinations: list[Tensor], scale: float | None) -> _Copy:
    types = {sources[0].dtype, destinations[0].dtype}
    if (
        not triton_may_copy(destinations[0].device)
        or not types <= _TRITON_TYPES
        # A captured graph would copy from a table that is gone when it is replayed.
        or (destinations[0].is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return _by_torch
    if bucket_copy() == "triton" or _triton_is_faster(sources, destinations, scale):
        return _by_triton
    return _by_torch


def _triton_is_faster(
    sources: list[Tensor], destinations: list[Tensor], scale: float | None
) -> bool:
    """Measured once for lists of about this length and size, by copying this one several times."""
    global _triton_fails
    if _triton_fails:
        return False
    size = sum(map(Tensor.numel, sources))
    kind = (
        destinations[0].device,
        sources[0].dtype,
        destinations[0].dtype,
        scale is None,
        len(sources).bit_length(),
        size.bit_length(),
    )
    if kind not in _triton_wins:
        stream = torch.cuda.current_stream(destinations[0].device)

        def seconds(way: _Copy) -> float:
            stream.synchronize()
            start = time.perf_counter()
            way(sources, destinations, scale)
            stream.synchronize()
            return time.perf_counter() - start

        try:
            seconds(_by_triton)  # compiles
            copied = torch.cat(destinations)
            seconds(_by_torch)
            if not torch.allclose(copied, torch.cat(destinations), 0, 0, equal_nan=True):
                raise RuntimeError("its copies differ from torch's")
        except Exception as error:  # a broken Triton, no C compiler, an unknown GPU
            _triton_fails = True
            warnings.warn(
                f"zerofix: torch copies gradients, because Triton cannot here: {error!r}",
                stacklevel=2,
            )
            return False
        rounds = [(seconds(_by_triton), seconds(_by_torch)) for _ in range(_ROUNDS)]
        triton, by_torch = (min(times) for times in zip(*rounds, strict=True))
        _triton_wins[kind] = triton < by_torch
    return _triton_wins[kind]
