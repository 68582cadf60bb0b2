"""The difference between the installed source of a target and what runs now, as text."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Mapping

from zerofix.edits import edited, edits_of, find
from zerofix.fix import Around, Change, Edit
from zerofix.source import Site


def unified_diff(places: Iterable[tuple[Site, Mapping[str, Change]]]) -> str:
    """A unified diff of the installed files and what runs instead.

    The edits make a patch that ``patch`` would accept. Other changes follow it, as the code that
    they add.

    Args:
        places: targets, each with fix name to change.
    """
    edits: dict[str, list[tuple[Site, Mapping[str, Change]]]] = {}
    additions = []
    for site, changes in places:
        edits.setdefault(site.function.__code__.co_filename, []).append((site, changes))
        for name, change in changes.items():
            if not isinstance(change, Edit):
                code = change.make if isinstance(change, Around) else change.body
                verb = "wrapped" if isinstance(change, Around) else "replaced"
                additions += [f"--- {site.path}", f"+++ {verb} by {name}"]
                additions += ["+" + line for line in inspect.getsource(code).splitlines()]
    lines: list[str] = []
    for file, sites in edits.items():
        with open(file, encoding="utf-8") as opened:
            before = opened.read().splitlines()
        after = list(before)
        # From the end of the file: text that is put in must not shift what is still to come.
        for site, changes in sorted(sites, key=lambda place: -place[0].node.lineno):
            first, end = site.function.__code__.co_firstlineno - 1, site.node.end_lineno
            text = "\n".join(after[first:end])
            for edit in edits_of(changes.values()):
                text = _substitute(text, edit)
            after[first:end] = text.splitlines()
        names = ", ".join(dict.fromkeys(name for _, changes in sites for name in changes))
        lines += difflib.unified_diff(before, after, file, file, "", names, lineterm="")
    return "\n".join(lines + additions) + "\n"


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
