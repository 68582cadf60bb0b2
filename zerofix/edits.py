"""Changes + original function -> new function. Touches nothing."""

from __future__ import annotations

import ast
import functools
import pickle
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from zerofix.fix import Around, Change, Edit, Replace
from zerofix.source import Definition, Site, compile_definition, decorate

Node = TypeVar("Node", bound=ast.AST)


class EditError(Exception):
    """A change does not fit the installed source."""


def build(site: Site, changes: Sequence[Change]) -> Any:
    """What to install at ``site`` so that all ``changes`` hold, in their order.

    Edits come first, on the source that DeepSpeed installed; the others follow on the result.

    Raises:
        EditError: an edit does not match as often as it declares, or the result would need a
            variable that the original does not have.
    """
    edits = edits_of(changes)
    attribute = site.attribute
    if edits:
        attribute = decorate(site, _rebuild(site, edited(site.node, edits)))
    for change in changes:
        if isinstance(change, Around):
            attribute = _below_descriptor(attribute, change.make)
        elif isinstance(change, Replace):
            body = functools.partial(_disguise, body=change.body)
            attribute = _below_descriptor(attribute, body)
    return attribute


def edits_of(changes: Iterable[Change]) -> list[Edit]:
    """The edits among changes, and those that go with others."""
    found = (c if isinstance(c, Edit) else c.edit for c in changes if not isinstance(c, Replace))
    return [edit for edit in found if edit is not None]


def edited(definition: Definition, edits: Sequence[Edit]) -> Definition:
    """A copy of ``definition`` with the edits made.

    Code that is put in carries the line number of the code it replaces.
    """
    result = _copy(definition)
    for edit in edits:
        matches = list(find(result, edit))
        if len(matches) != edit.times:
            raise EditError(
                f"expected {edit.times} match(es) in {definition.name}, found {len(matches)}, of:"
                f"\n{textwrap.indent(edit.find.strip(), '    ')}"
            )
        if _overlap(matches):
            raise EditError(f"matches in {definition.name} overlap:\n{edit.find}")
        put = _parse(edit.put)
        # From the back: statements that are put in must not shift the matches still to come.
        for holder, field, index, length in reversed(matches):
            old = getattr(holder, field)
            replaced = old if index is None else old[index]
            new = [_at(_copy(node), replaced) for node in put]
            if index is None or isinstance(replaced, ast.expr):
                if len(new) != 1 or not isinstance(new[0], ast.Expr):
                    raise EditError(f"an expression cannot become:\n{edit.put}")
                if isinstance(getattr(replaced, "ctx", None), ast.Store | ast.Del):
                    raise EditError(
                        f"an expression that is assigned to cannot be edited:\n{edit.find}"
                    )
                if index is None:
                    setattr(holder, field, new[0].value)
                else:
                    old[index] = new[0].value
            else:
                old[index : index + length] = new
    return result


Match = tuple[ast.AST, str, int | None, int]
"""Parent node, its field, index in that field where it is a list, number of nodes."""


def find(definition: Definition, edit: Edit) -> Iterator[Match]:
    """Where the edit matches, in the order of the source."""
    pattern = _parse(edit.find)
    single = pattern[0].value if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) else None
    wanted = [ast.dump(node) for node in pattern] if single is None else [_key(single)]
    size = len(wanted)
    # Not in decorators and defaults: those have been evaluated.
    inside = (node for statement in definition.body for node in ast.walk(statement))
    for parent in [definition, *inside]:
        for field, value in ast.iter_fields(parent):
            if parent is definition and field != "body":
                continue
            if not isinstance(value, list):
                if single and type(value) is type(single) and _key(value) == wanted[0]:
                    yield parent, field, None, 1
            elif single:
                for i, item in enumerate(value):
                    if type(item) is type(single) and _key(item) == wanted[0]:
                        yield parent, field, i, 1
            elif value and isinstance(value[0], ast.stmt):
                for i in range(len(value) - size + 1):
                    # Most are of another type, and dumping takes long.
                    if type(value[i]) is type(pattern[0]) and wanted == [
                        ast.dump(node) for node in value[i : i + size]
                    ]:
                        yield parent, field, i, size


def _overlap(matches: Sequence[Match]) -> bool:
    """Whether a node belongs to two matches."""
    seen: set[int] = set()
    for holder, field, index, length in matches:
        found = getattr(holder, field)
        roots = [found] if index is None else found[index : index + length]
        # Nodes without a place, as contexts and operators, are shared.
        nodes = {id(n) for root in roots for n in ast.walk(root) if hasattr(n, "lineno")}
        if nodes & seen:
            return True
        seen |= nodes
    return False


def _key(node: ast.expr) -> str:
    # A name that is read matches the same name where it is written.
    return ast.dump(node).replace("Store()", "Load()")


def _copy(node: Node) -> Node:
    copied: Node = pickle.loads(pickle.dumps(node))  # as copy.deepcopy, in less time
    return copied


def _parse(code: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(code).strip()).body


def _at(node: ast.stmt, place: ast.AST) -> ast.stmt:
    for child in ast.walk(node):
        if isinstance(child, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword):
            ast.copy_location(child, place)
            child.end_lineno, child.end_col_offset = child.lineno, child.col_offset
    return node


def _rebuild(site: Site, node: Definition) -> types.FunctionType:
    original = site.function
    try:
        code = compile_definition(site, node)
    except (SyntaxError, ValueError) as error:
        raise EditError(f"{site.name} does not compile with its edits: {error}") from error
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    if "__class__" in code.co_freevars:
        cells.setdefault("__class__", types.CellType(site.owner))
    missing = [v for v in code.co_freevars if v not in cells]
    if missing:
        raise EditError(f"{site.name} has no variable {', '.join(missing)} to close over")
    new = types.FunctionType(
        code,
        original.__globals__,
        original.__name__,
        original.__defaults__,
        tuple(cells[v] for v in code.co_freevars),
    )
    new.__kwdefaults__ = original.__kwdefaults__
    _disguise(original, new)
    return new


def _disguise(original: Any, body: Any) -> Any:
    """Give ``body`` the names of the original, without a ``__wrapped__`` that leads around it."""
    functools.update_wrapper(body, original)
    del body.__wrapped__
    return body


def _below_descriptor(attribute: Any, change: Any) -> Any:
    if isinstance(attribute, staticmethod | classmethod):
        return type(attribute)(change(attribute.__func__))
    if not isinstance(attribute, types.FunctionType):
        raise EditError(f"cannot wrap a {type(attribute).__name__}")
    return change(attribute)
