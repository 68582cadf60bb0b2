"""Queues torch's operations on CPU tensors on the current virtual stream.

Output shapes come from a dry run on zeros; the outputs are allocated at once and filled when the
operation runs. Views, allocations and other work on metadata happen at once, as on a GPU. What
answers the host (``item``, ``nonzero``, ``equal``) waits for the current stream, as on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from zerofix.testing.checker import Allocation, Span
from zerofix.testing.collectives import collective
from zerofix.testing.device import Device
from zerofix.testing.memory import Place

# They return a view or change metadata, and their schema does not say so.
METADATA = re.compile(
    r"aten::(set_|lift|lift_fresh|_unsafe_view|_reshape_alias|detach_?|is_same_size|"
    r"_has_compatible_shallow_copy_type|_version|sym_\w+|is_pinned|rename_?)$"
)
ALLOCATIONS = re.compile(r"aten::(empty|empty_like|empty_strided|new_empty|new_empty_strided)$")
# These read their tensors' metadata only.
FACTORIES = re.compile(r"aten::(new_\w+|\w+_like)$")


class Kind(Enum):
    METADATA = auto()
    ALLOCATION = auto()
    RESIZE = auto()
    HOST = auto()
    RANDOM = auto()
    WORK = auto()


@cache
def kind(operator: OpOverload) -> Kind:
    name, returns = operator._schema.name, operator._schema.returns
    if name == "aten::resize_":
        return Kind.RESIZE
    if METADATA.match(name) or torch.Tag.inplace_view in operator.tags:
        return Kind.METADATA
    if any(value.alias_info and not value.alias_info.is_write for value in returns):
        return Kind.METADATA
    if ALLOCATIONS.match(name):
        return Kind.ALLOCATION
    on_data = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    if on_data & set(operator.tags) or any("Tensor" not in str(value.type) for value in returns):
        return Kind.HOST
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return Kind.RANDOM
    return Kind.WORK


@cache
def written(operator: OpOverload) -> frozenset[str]:
    """The names of the arguments an operator writes."""
    arguments = operator._schema.arguments
    return frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


def named(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = operator._schema.arguments
    return dict(zip((a.name for a in arguments), args, strict=False)) | kwargs


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def zeros(value: Any) -> Any:
    """Its argument with every tensor replaced by one of zeros, of the same shape."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype).zero_()

    return tree_map(blank, value)


def signature(value: Any) -> Any:
    """What of an argument the shape of the outputs may depend on; hashable."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.size()), value.stride())
    if isinstance(value, list | tuple):
        return tuple(signature(item) for item in value)
    if isinstance(value, float | complex):
        return type(value)
    return (type(value), value)


def generator_of(arguments: dict[str, Any]) -> torch.Generator:
    generator = arguments.get("generator")
    return generator if isinstance(generator, torch.Generator) else torch.default_generator


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, in the forward, the backward and in hooks."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.outputs: dict[Any, tuple[list[Any], Any]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C._DisableTorchDispatch():
            if func.namespace == "c10d":
                return collective(self.device, func, args, kwargs)
            given = tensors((args, kwargs))
            if kwargs.get("device") == torch.device("meta") or any(
                tensor.device.type != "cpu" for tensor in given
            ):
                return func(*args, **kwargs)
            which = kind(func)
            if which is Kind.METADATA:
                return func(*args, **kwargs)
            if which is Kind.RESIZE:
                return self.resize(args[0], args[1])
            if which is Kind.ALLOCATION:
                return self.allocate(func(*args, **kwargs))
            if which is Kind.HOST or any(tensor.layout != torch.strided for tensor in given):
                return self.answer(func, args, kwargs)
            return self.work(func, args, kwargs, which is Kind.RANDOM)

    def allocate(self, like: Tensor) -> Tensor:
        if like.layout != torch.strided or like.device.type != "cpu":
            return like
        return self.device.memory.allocate(
            like.size(), like.stride(), like.dtype, self.device.current.id
        )

    def work(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], random: bool
    ) -> Any:
        arguments = named(func, args, kwargs)
        # What is drawn is decided by the order of issue, as on a GPU.
        generator = generator_of(arguments)
        state = generator.get_state() if random else None
        leaves, shape = self.shapes(func, args, kwargs, random)
        outputs = [self.allocate(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        reads, writes, targets = self.accesses(func, arguments)
        results = [self.device.memory.find(out) for out in outputs if isinstance(out, Tensor)]
        call = self.later(func, args, kwargs)

        def run() -> None:
            # It has places, not tensors: to hold a tensor would keep it from being freed.
            if state is None:
                answers = call()
            else:
                now = generator.get_state()
                generator.set_state(state)
                answers = call()
                generator.set_state(now)
            if results:
                for (_, out, _), value in zip(results, tensors(answers), strict=True):
                    out.tensor().copy_(value)

        self.device.issue(
            str(func), self.device.current, guarded(run), reads=reads, writes=writes + results
        )
        return self.returned(func, targets, outputs, shape)

    def shapes(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], random: bool
    ) -> tuple[list[Any], Any]:
        """Meta tensors like the new outputs, and the tree they are the leaves of.

        A dry run also raises a wrong call's error where the call is.
        """
        key = None if random else (func, signature(args), signature(tuple(kwargs.items())))
        if key is not None and key in self.outputs:
            return self.outputs[key]
        blank_args, blank_kwargs = zeros((args, kwargs))
        answer = func(*blank_args, **blank_kwargs)
        for tensor, blank in zip(
            tensors((args, kwargs)), tensors((blank_args, blank_kwargs)), strict=True
        ):
            if tensor.size() != blank.size():  # an empty `out=`
                self.resize(tensor, blank.size())
                key = None
        if written(func) and all(r.alias_info for r in func._schema.returns):
            answer = ()
        leaves, shape = tree_flatten(answer)
        if key is None:
            return leaves, shape
        blanks = [
            torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self.outputs[key] = blanks, shape
        return blanks, shape

    def accesses(
        self, func: OpOverload, arguments: dict[str, Any]
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """What a call reads, what it writes, and the arguments it writes, by name."""
        reads: list[tuple[Allocation | None, Place, Span]] = []
        writes: list[tuple[Allocation | None, Place, Span]] = []
        targets: dict[str, Any] = {}
        metadata_only = bool(FACTORIES.match(func._schema.name))
        for name, value in arguments.items():
            if name in written(func):
                targets[name] = value
                writes += map(self.device.memory.find, tensors(value))
            elif not metadata_only:
                reads += map(self.device.memory.find, tensors(value))
        return reads, writes, targets

    def returned(
        self, func: OpOverload, targets: dict[str, Any], outputs: list[Any], shape: Any
    ) -> Any:
        returns = func._schema.returns
        if not targets or not any(value.alias_info for value in returns):
            return tree_unflatten(outputs, shape) if returns else None
        # An in-place operator returns what it writes, in the order of its arguments.
        values = list(targets.values())
        return values[0] if len(returns) == 1 else tuple(values)

    def answer(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answers: list[Any] = []
        reads, writes, _ = self.accesses(func, named(func, args, kwargs))
        self.device.issue(
            str(func),
            self.device.current,
            guarded(lambda: answers.append(func(*args, **kwargs))),
            reads=reads,
            writes=writes,
        )
        self.device.current.finish()
        return answers[0]

    def resize(self, tensor: Tensor, size: Sequence[int]) -> Tensor:
        """``resize_``: memory of the allocator cannot grow, so it is exchanged for more."""
        elements = torch.Size(size).numel() + int(tensor.storage_offset())
        storage = tensor.untyped_storage()
        if elements * tensor.itemsize <= storage.nbytes():
            return tensor.resize_(size)
        kept = storage.nbytes() // tensor.itemsize
        old = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (kept,), (1,))
        stream = self.device.current.id
        new = self.device.memory.allocate((elements,), (1,), tensor.dtype, stream)
        if kept:
            self.work(torch.ops.aten.copy_.default, (new[:kept], old), {}, False)
        storage, strides = new.untyped_storage(), torch.empty(size, device="meta").stride()
        return tensor.set_(storage, tensor.storage_offset(), size, strides)

    def later(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """The call, with its tensors' places kept and not the tensors."""
        leaves, tree = tree_flatten((args, kwargs))
        kept = [
            self.device.memory.find(leaf)[1] if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]

        def call() -> Any:
            arguments, options = tree_unflatten(
                [leaf.tensor() if isinstance(leaf, Place) else leaf for leaf in kept], tree
            )
            return func(*arguments, **options)

        return call


def guarded(run: Callable[[], None]) -> Callable[[], None]:
    """Run below autograd and below every mode, whoever made the operation run."""

    def below() -> None:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            run()

    return below
