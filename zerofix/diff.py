"""The difference between the installed source of a target and what runs now, as text."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Mapping

from zerofix.edits import edited, find
from zerofix.fix import Around, Change, Edit
from zerofix.source import Site


def unified_diff(site: Site, changes: Mapping[str, Change]) -> str:
    """A unified diff of one target, with the file's own line numbers.

    Args:
        changes: fix name to the change it makes here. Changes other than edits are shown as
            the code that they add.
    """
    file = site.function.__code__.co_filename
    before = definition_text(site)
    after = before
    for change in changes.values():
        if isinstance(change, Edit):
            after = _substitute(after, change)
    lines = list(
        difflib.unified_diff(
            before.splitlines(),
            after.splitlines(),
            file,
            f"{file} ({', '.join(changes)})",
            lineterm="",
        )
    )
    first = site.function.__code__.co_firstlineno
    lines = [_shift(line, first - 1) if line.startswith("@@") else line for line in lines]
    for name, change in changes.items():
        if not isinstance(change, Edit):
            code = change.make if isinstance(change, Around) else change.body
            verb = "wrapped" if isinstance(change, Around) else "replaced"
            lines += [f"--- {site.path}", f"+++ {verb} by {name}"]
            lines += ["+" + line for line in inspect.getsource(code).splitlines()]
    return "\n".join(lines) + "\n"


def definition_text(site: Site) -> str:
    """The installed text of a target, decorators included."""
    with open(site.function.__code__.co_filename, encoding="utf-8") as file:
        lines = file.readlines()
    end = site.node.end_lineno
    return "".join(lines[site.function.__code__.co_firstlineno - 1 : end])


def _substitute(text: str, edit: Edit) -> str:
    """Make an edit in the text of a definition, so that it means what the edited tree means."""
    node = _parse(text)
    wanted = ast.dump(edited(node, [edit]))
    put = textwrap.dedent(edit.put).strip()
    for candidate in (put, f"({put})"):  # in parentheses where it would bind another way
        lines = text.splitlines(keepends=True)
        for holder, field, index, length in reversed(list(find(node, edit))):
            found = getattr(holder, field)
            first = found if index is None else found[index]
            last = found if index is None else found[index + length - 1]
            # Columns count bytes; the definition was parsed below an "if True:" line.
            top, bottom = first.lineno - 2, last.end_lineno - 2
            head = lines[top].encode()[: first.col_offset].decode()
            tail = lines[bottom].encode()[last.end_col_offset :].decode()
            margin = " " * first.col_offset
            new = candidate.replace("\n", "\n" + margin)
            lines[top : bottom + 1] = [head + new + tail]
        changed = "".join(lines)
        try:
            if ast.dump(_parse(changed)) == wanted:
                return changed
        except SyntaxError:
            continue
    raise ValueError(f"no text for the edit:\n{edit.put}")


def _parse(text: str) -> ast.FunctionDef:
    if not text[0].isspace():
        text = textwrap.indent(text, " ")
    tree = ast.parse("if True:\n" + text)
    branch = tree.body[0]
    assert isinstance(branch, ast.If)
    definition = branch.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _shift(header: str, by: int) -> str:
    """Move the line numbers of a hunk header ``@@ -a,b +c,d @@``."""
    old, new = header.split()[1:3]
    parts = []
    for sign, span in (("-", old), ("+", new)):
        start, comma, length = span[1:].partition(",")
        parts.append(f"{sign}{int(start) + by}{comma}{length}")
    return f"@@ {' '.join(parts)} @@"
