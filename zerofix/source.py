"""Where a target lives: the object in memory, its source on disk, its fingerprint."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_FUTURE_FLAGS = sum(
    getattr(__future__, name).compiler_flag for name in set(__future__.all_feature_names)
)

ABSENT = "absent"
"""The fingerprint of a target that a release does not have."""


class Unreadable(Exception):
    """The source of a target cannot be had, or is not what runs."""


class Foreign(Exception):
    """A target is no longer DeepSpeed's own: somebody else has replaced it."""


@dataclass(frozen=True)
class Site:
    """A target as DeepSpeed installed it."""

    path: str
    owner: Any
    """The class (or module) whose attribute the target is."""
    name: str
    attribute: Any
    """What the owner's ``__dict__`` holds: the function, or what decorators made of it."""
    function: types.FunctionType
    """The function itself, below its decorators."""
    node: Definition
    """Its definition, with the line numbers of the source file."""

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.node)


def locate(path: str, module: types.ModuleType) -> Site | None:
    """Find the target ``path`` in its imported module; None when the release does not have it.

    Raises:
        Unreadable: there is no source, or it is not the source of the code that runs.
        Foreign: the attribute is not the function that the source defines.
    """
    owner, name = owner_of(path, module), path.rpartition(".")[2]
    attribute_name = name
    if name.startswith("__") and not name.endswith("__") and isinstance(owner, type):
        attribute_name = f"_{owner.__name__.lstrip('_')}{name}"
    if owner is None or attribute_name not in vars(owner):
        return None
    attribute = vars(owner)[attribute_name]

    file = module.__file__ or ""
    if not file.endswith(".py"):
        raise Unreadable(f"{module.__name__} comes without source ({file or 'no file'})")
    function = next(
        (
            f
            for f in _layers(attribute)
            if isinstance(f, types.FunctionType)
            and f.__code__.co_filename == file
            and f.__code__.co_name == name
        ),
        None,
    )
    if function is None:
        raise Foreign(f"{path} was replaced by {party(attribute)}")
    node = _definition(function, module)
    site = Site(path, owner, attribute_name, attribute, function, node)
    if not _alike(compile_definition(site, node), function.__code__):
        raise Unreadable(f"{file} is not the source of the code that runs")
    if _shape(attribute) != _shape(decorate(site, function)):
        raise Foreign(f"{path} was replaced by {party(attribute)}")
    return site


def owner_of(path: str, module: types.ModuleType) -> Any:
    """The class (or the module) that the target ``path`` is an attribute of, or None."""
    owner: Any = module
    for part in path.partition(":")[2].split(".")[:-1]:
        owner = vars(owner).get(part)
        if owner is None:
            return None
    return owner


def compile_definition(site: Site, node: Definition) -> types.CodeType:
    """Compile ``node`` as if it stood where the site's function stands.

    Inside classes of the same names, so that private names are mangled and ``super()`` finds
    its cell; inside a function that has the original's free variables, so that they stay free.
    """
    original = site.function.__code__
    *classes, name = site.path.partition(":")[2].split(".")
    free = [v for v in original.co_freevars if v != "__class__"]
    headers = [f"class {c}:" for c in classes]
    if free:
        headers.insert(0, f"def enclosing({', '.join(free)}):")
    tree = ast.parse(
        "".join(" " * depth + line + "\n" for depth, line in enumerate(headers))
        + " " * len(headers)
        + "pass"
    )
    innermost: Any = tree
    for _ in headers:
        innermost = innermost.body[0]
    innermost.body = [node]
    code: types.CodeType = compile(
        tree,
        original.co_filename,
        "exec",
        flags=original.co_flags & _FUTURE_FLAGS,
        dont_inherit=True,
    )
    for scope in (["enclosing"] if free else []) + classes + [name]:
        code = next(
            c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == scope
        )
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=original.co_qualname)
    return code


def decorate(site: Site, function: Any) -> Any:
    """Put the decorators of the site's source around ``function``."""
    scope = dict(vars(site.owner))
    for expression in reversed(site.node.decorator_list):
        code = compile(ast.Expression(expression), site.function.__code__.co_filename, "eval")
        function = eval(code, site.function.__globals__, scope)(function)
    return function


def fingerprint(node: ast.AST) -> str:
    """A hash of a definition that docstrings, comments and formatting do not change.

    The same under every Python from 3.10 on.
    """
    import hashlib

    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _canonical(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = []
        for field in node._fields:
            value = getattr(node, field, None)
            if field == "body" and _has_docstring(node):
                value = value[1:]  # type: ignore[index]
            if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty pieces
                value = [v for v in node.values if getattr(v, "value", None) != ""]
            # Fields that only some Pythons have are written when they are filled.
            if value is None or value == [] or field in ("ctx", "kind", "type_comment"):
                continue
            fields.append(f"{field}={_canonical(value)}")
        return f"{type(node).__name__}({''.join(fields)})"
    if isinstance(node, list):
        return "[" + "".join(_canonical(item) + "," for item in node) + "]"
    return f"{type(node).__name__}:{node!r}"


def _alike(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects come from the same source.

    Their bytecode is not compared: CPython compiles a call on an imported name in another way
    when it sees the import, which is outside of the definition.
    """
    return (
        (one.co_name, one.co_firstlineno, one.co_flags)
        == (other.co_name, other.co_firstlineno, other.co_flags)
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and one.co_freevars == other.co_freevars
        and len(one.co_consts) == len(other.co_consts)
        and all(
            _alike(a, b)
            if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
            else (type(a), a) == (type(b), b)
            for a, b in zip(one.co_consts, other.co_consts, strict=True)
        )
    )


def _has_docstring(node: ast.AST) -> bool:
    match node:
        case (
            ast.FunctionDef(body=[ast.Expr(ast.Constant(value=str())), *_])
            | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(value=str())), *_])
            | ast.ClassDef(body=[ast.Expr(ast.Constant(value=str())), *_])
        ):
            return True
    return False


def _definition(function: types.FunctionType, module: types.ModuleType) -> Definition:
    """Parse the function's own lines, and no others."""
    loader: Any = module.__spec__ and module.__spec__.loader
    text = loader.get_source(module.__name__) if hasattr(loader, "get_source") else None
    if text is None:
        raise Unreadable(f"{module.__name__} comes without source")
    first = function.__code__.co_firstlineno
    block = inspect.getblock(io.StringIO(text).readlines()[first - 1 :])
    # The extra line lets an indented definition be parsed as it stands, columns and all.
    try:
        tree = ast.parse("if True:\n" + "".join(block) if block[0][0].isspace() else "".join(block))
    except (SyntaxError, IndexError):
        raise Unreadable(
            f"{module.__file__}:{first} is not the source of the code that runs"
        ) from None
    node: Any = tree.body[0]
    shift = first - 1
    if isinstance(node, ast.If):
        node, shift = node.body[0], first - 2
    if not isinstance(node, Definition):
        raise Unreadable(f"{module.__file__}:{first} is not the source of the code that runs")
    return ast.increment_lineno(node, shift)


def _layers(attribute: object) -> Iterator[Any]:
    """The attribute and everything callable that it wraps, outermost first."""
    todo, seen = [attribute], set()
    while todo:
        layer: Any = todo.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if isinstance(layer, property):
            todo.append(layer.fget)
        elif hasattr(layer, "__func__"):
            todo.append(layer.__func__)
        elif hasattr(layer, "__wrapped__"):
            todo.append(layer.__wrapped__)
        elif isinstance(layer, types.FunctionType):
            # Some decorators (instrument_w_nvtx) leave no trace but their closure.
            cells = layer.__closure__ or ()
            todo.extend(c.cell_contents for c in cells if _holds_function(c))


def _holds_function(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:  # an empty cell
        return False


def _shape(attribute: object) -> list[object]:
    """What the attribute is made of: equal for two decorations of the same function."""
    return [getattr(layer, "__code__", type(layer)) for layer in _layers(attribute)]


def subclasses(cls: type) -> Iterator[type]:
    """All classes below a class."""
    below: list[type] = type.__subclasses__(cls)
    for subclass in below:
        yield subclass
        yield from subclasses(subclass)


def party(attribute: object) -> str:
    """Whose code an attribute is, for messages: ``module (file:line)``."""
    for layer in _layers(attribute):
        if isinstance(layer, types.FunctionType):
            code = layer.__code__
            return f"{layer.__module__} ({code.co_filename}:{code.co_firstlineno})"
    return f"{type(attribute).__module__}.{type(attribute).__qualname__} object"
