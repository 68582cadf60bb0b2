"""How a target is found, recognised and rebuilt, on a small module of every awkward shape."""

import functools
import importlib
import inspect
import pickle
import sys
import traceback

import pytest

from zerofix.diff import unified_diff
from zerofix.edits import EditError, build
from zerofix.fix import Around, Edit, Replace
from zerofix.source import Foreign, Unreadable, fingerprint, locate

MODULE = '''
from __future__ import annotations
import functools
import math
from contextlib import contextmanager


def hidden(function):
    """Like DeepSpeed's instrument_w_nvtx: no functools.wraps."""
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapped


def polite(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper


class Base:
    def total(self, x):
        return x


class Engine(Base):
    __factor = 10

    def total(self, x, *, times=2):
        """Doc."""
        # a comment
        text = """line one
  line two"""
        if x > 1:
            y = super().total(x) * self.__factor
        else:
            y = math.floor(x)
        return y * times

    @hidden
    def nvtx(self, x):
        return x > 1

    @polite
    @hidden
    def both(self, x):
        return x > 1

    @staticmethod
    def static(x):
        return x > 1

    @classmethod
    def made(cls, x):
        return cls, x > 1

    @property
    def prop(self):
        return 1 > 1

    @contextmanager
    def managed(self):
        yield 1 > 1

    def plain(self, x, default=[]):
        default.append(x)
        return x > 1

    def raises(self, x):
        if x > 1:
            raise RuntimeError("here")

    def nested(self, values):
        return [v for v in values if v > 1], (lambda v: v > 1)(values[0])

    def repeats(self, n):
        self.n = n
        n.append(1)
        n.append(1)
        n.append(1)
        return self.n

    def __private(self, x):
        return x > 1

    class Inner:
        def deep(self, x):
            return x > 1


def make(offset):
    class Closed:
        def shifted(self, x):
            return x + offset > 1
    return Closed


Closed = make(5)
'''


@pytest.fixture
def acme(tmp_path, monkeypatch):
    (tmp_path / "acme.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("acme", None)
    yield importlib.import_module("acme")
    sys.modules.pop("acme", None)


def rebuilt(acme, name, *changes):
    """Install the changes at Engine.NAME; return the site."""
    site = locate(f"acme:{name}", acme)
    setattr(site.owner, site.name, build(site, changes))
    return site


ONE_TO_ZERO = Edit("x > 1", "x > 0")


def test_an_edit_changes_what_it_names_and_nothing_else(acme):
    before = acme.Engine.total
    rebuilt(acme, "Engine.total", ONE_TO_ZERO)
    after = acme.Engine.total
    assert acme.Engine().total(1, times=3) == 30  # the private name and super() still resolve
    assert acme.Engine().total(0.5) == 10.0
    assert after is not before
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__"):
        assert getattr(after, attribute) == getattr(before, attribute)
    assert after.__annotations__ == before.__annotations__
    assert inspect.signature(after) == inspect.signature(before)
    assert after.__globals__ is before.__globals__
    assert after.__code__.co_filename == before.__code__.co_filename
    assert not hasattr(after, "__wrapped__")
    if sys.version_info >= (3, 11):
        assert after.__code__.co_qualname == before.__code__.co_qualname


def test_code_around_may_bring_an_edit_that_the_difference_shows(acme):
    around = Around(
        lambda original: lambda self, x, **options: original(self, x, **options), ONE_TO_ZERO
    )
    site = rebuilt(acme, "Engine.total", around)
    assert acme.Engine().total(0.5) == 10.0
    text = unified_diff([(site, {"some_fix": around})])
    assert "x > 0" in text
    assert "wrapped by some_fix" in text


def test_defaults_are_the_same_objects(acme):
    default = acme.Engine.plain.__defaults__[0]
    rebuilt(acme, "Engine.plain", ONE_TO_ZERO)
    assert acme.Engine.plain.__defaults__[0] is default
    acme.Engine().plain(1)
    assert default == [1]


@pytest.mark.parametrize("name", ["nvtx", "both"])
def test_decorators_stay_around_an_edited_function(acme, name):
    wrapper = getattr(acme.Engine, name)
    rebuilt(acme, f"Engine.{name}", ONE_TO_ZERO)
    assert getattr(acme.Engine, name).__code__ is wrapper.__code__
    assert getattr(acme.Engine(), name)(1)


@pytest.mark.parametrize(
    ("name", "call", "result"),
    [
        ("static", lambda e: e.static(1), True),
        ("made", lambda e: e.made(1)[1], True),
        ("nested", lambda e: e.nested([1]), ([], False)),
        ("Inner.deep", lambda e: e.Inner().deep(1), True),
    ],
)
def test_every_kind_of_method_can_be_edited(acme, name, call, result):
    kind = type(inspect.getattr_static(acme.Engine, name.split(".")[0]))
    rebuilt(
        acme,
        f"Engine.{name}",
        Edit("x > 1", "x > 0") if result is True else Edit("values[0]", "values[0]"),
    )
    assert call(acme.Engine()) == result
    assert type(inspect.getattr_static(acme.Engine, name.split(".")[0])) is kind


def test_properties_and_context_managers_can_be_edited(acme):
    rebuilt(acme, "Engine.prop", Edit("1 > 1", "2 > 1"))
    assert acme.Engine().prop is True
    rebuilt(acme, "Engine.managed", Edit("1 > 1", "2 > 1"))
    with acme.Engine().managed() as value:
        assert value is True


def test_closures_are_kept(acme):
    rebuilt(acme, "Closed.shifted", Edit("x + offset > 1", "x + offset > 100"))
    assert not acme.Closed().shifted(95)
    assert acme.Closed().shifted(96)


def test_a_subclass_cell_points_to_the_real_class(acme):
    rebuilt(acme, "Engine.plain", Edit("return x > 1", "return super().total(x)"))

    class Sub(acme.Engine):
        pass

    assert Sub().plain(7) == 7


def test_tracebacks_name_file_and_line_of_the_source(acme):
    line = MODULE.splitlines().index('            raise RuntimeError("here")') + 1
    rebuilt(acme, "Engine.raises", Edit("x > 1", "x > 0 and\\\n x"))
    with pytest.raises(RuntimeError) as caught:
        acme.Engine().raises(1)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.name) == (acme.__file__, line, "raises")
    assert frame.line == 'raise RuntimeError("here")'


def test_statements_can_become_several_in_place(acme):
    rebuilt(
        acme,
        "Engine.total",
        Edit(
            "if x > 1:\n    y = super().total(x) * self.__factor\nelse:\n    y = math.floor(x)",
            "y = 1\ny += x",
        ),
    )
    assert acme.Engine().total(2) == 6


def test_an_edit_must_match_as_often_as_it_says(acme):
    site = locate("acme:Engine.nested", acme)
    with pytest.raises(EditError, match=r"expected 1 match\(es\) in nested, found 2"):
        build(site, [Edit("v > 1", "v > 0")])
    build(site, [Edit("v > 1", "v > 0", times=2)])
    with pytest.raises(EditError, match="found 0"):
        build(site, [Edit("v >= 1", "v > 0")])


def test_an_edit_may_not_close_over_what_is_not_there(acme):
    site = locate("acme:Closed.shifted", acme)
    build(site, [Edit("x + offset", "x + elsewhere")])  # a global: allowed, as in any source
    with pytest.raises(EditError, match="an expression cannot become"):
        build(site, [Edit("x + offset", "x = 1")])


def test_an_edit_that_would_do_nothing_or_overlap_is_refused(acme):
    with pytest.raises(EditError, match="found 0"):  # a default has been evaluated
        build(locate("acme:Engine.total", acme), [Edit("2", "3")])
    site = locate("acme:Engine.repeats", acme)
    with pytest.raises(EditError, match="overlap"):
        build(site, [Edit("n.append(1)\nn.append(1)", "n.append(2)", times=2)])
    with pytest.raises(EditError, match="assigned to"):
        build(site, [Edit("self.n", "self.m", times=2)])


def test_private_functions_can_be_edited(acme):
    rebuilt(acme, "Engine.__private", ONE_TO_ZERO)
    assert acme.Engine()._Engine__private(1)


def test_formatting_does_not_hide_a_match(acme):
    rebuilt(acme, "Engine.total", Edit("math . floor(x,)", "math.ceil(x)"))
    assert acme.Engine().total(0.5) == 2


def test_around_and_replace_are_plain_functions_that_pickle(acme):
    def make(original):
        @functools.wraps(original)
        def twice(*args, **kwargs):
            return original(*args, **kwargs), original(*args, **kwargs)

        return twice

    rebuilt(acme, "Engine.plain", ONE_TO_ZERO, Around(make))
    assert acme.Engine().plain(1) == (True, True)
    rebuilt(acme, "Engine.raises", Replace(lambda self, x: x + 1))
    assert acme.Engine().raises(1) == 2
    rebuilt(acme, "Engine.static", Around(make))
    assert acme.Engine.static(2) == (True, True)
    rebuilt(acme, "Engine.total", ONE_TO_ZERO)
    for function in (acme.Engine.plain, acme.Engine.raises, acme.Engine.total):
        assert type(function).__name__ == "function"
        assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(acme.Engine().total))(1) == 20


def test_the_fingerprint_ignores_docstrings_comments_and_formatting(acme, tmp_path):
    reformatted = (
        MODULE.replace('        """Doc."""\n        # a comment\n', "")
        .replace("return y * times", "return (y\n                * times)")
        .replace("*, times=2", "*,times = 2")
    )
    assert reformatted != MODULE
    (tmp_path / "other.py").write_text(reformatted)
    other = importlib.import_module("other")
    first, second = locate("acme:Engine.total", acme), locate("other:Engine.total", other)
    assert first.fingerprint == second.fingerprint
    changed = reformatted.replace("line two", "line 2")
    (tmp_path / "third.py").write_text(changed)
    third = importlib.import_module("third")
    assert locate("third:Engine.total", third).fingerprint != first.fingerprint


def test_the_fingerprint_is_the_same_under_every_python():
    import ast

    text = '''
@decorated(1)
def f(self, a: int = 1, /, *b, c: "str" = f"{a!r:>{b}} {{x}} {c}", **d) -> None:
    """Doc."""
    async with a as b, c: pass
    match a:
        case [1, *_] | {"k": -1j}: return u"x" "y", b"z", 1e400, ...
    x: int = (yield); x = y[1:2, ::3]; del x
    try: pass
    except E as e: raise X from e
    return lambda *, k=1: {**a, 1: (w := 2)}
'''
    assert fingerprint(ast.parse(text)) == "b801c13a9aeb48a1"


def test_an_absent_target_is_no_error(acme):
    assert locate("acme:Engine.gone", acme) is None
    assert locate("acme:Gone.total", acme) is None
    assert locate("acme:Engine.Gone.total", acme) is None


@pytest.mark.parametrize("name", ["plain", "nvtx", "static"])
def test_a_target_that_somebody_else_replaced_is_named(acme, name):
    original = getattr(acme.Engine, name)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        return original(*args, **kwargs)

    def foreign(*args, **kwargs):
        return original(*args, **kwargs)

    for theirs in (patched, foreign, object()):
        setattr(acme.Engine, name, theirs)
        with pytest.raises((Foreign, Unreadable), match=f"acme:Engine.{name}|{__file__}"):
            locate(f"acme:Engine.{name}", acme)


def test_another_partys_code_in_the_function_is_seen(acme):
    acme.Engine.plain.__code__ = (lambda self, x, default=[]: x).__code__
    with pytest.raises(Foreign, match=__file__):
        locate("acme:Engine.plain", acme)


def test_source_that_changed_on_disk_is_not_trusted(acme, tmp_path):
    (tmp_path / "acme.py").write_text(MODULE.replace("default.append(x)", "default.extend(x)"))
    with pytest.raises(Unreadable, match="not the source of the code that runs"):
        locate("acme:Engine.plain", acme)
    (tmp_path / "acme.py").write_text("\n\n" + MODULE)
    with pytest.raises(Unreadable, match="not the source of the code that runs"):
        locate("acme:Engine.plain", acme)


def test_a_module_without_source_is_unreadable(acme, tmp_path):
    import py_compile

    py_compile.compile(str(tmp_path / "acme.py"), cfile=str(tmp_path / "bare.pyc"))
    bare = importlib.import_module("bare")
    with pytest.raises(Unreadable, match="comes without source"):
        locate("bare:Engine.plain", bare)


def test_the_diff_is_a_patch_of_the_file(acme):
    text = unified_diff(
        [
            (
                locate("acme:Engine.total", acme),
                {
                    "one": Edit("x > 1", "x > 0 or x"),
                    "two": Edit("return y * times", "z = y\nreturn z * times"),
                },
            ),
            (locate("acme:Closed.shifted", acme), {"three": Edit("offset", "(1 if x else 2)")}),
            (locate("acme:Engine.plain", acme), {"four": Around(functools.lru_cache)}),
        ]
    )
    lines = text.splitlines()
    assert lines[:2] == [f"--- {acme.__file__}", f"+++ {acme.__file__}\tone, two, three, four"]
    at = MODULE.splitlines().index("        if x > 1:") + 1
    assert lines[2].startswith(f"@@ -{at - 3},")
    changed = [line for line in lines if line[0] in "+-"]
    assert changed[2:9] == [
        "-        if x > 1:",
        "+        if x > 0 or x:",
        "-        return y * times",
        "+        z = y",
        "+        return z * times",
        "-            return x + offset > 1",
        "+            return x + (1 if x else 2) > 1",
    ]
    assert changed[9:11] == ["--- acme:Engine.plain", "+++ wrapped by four"]


def test_the_diff_puts_parentheses_where_the_edit_needs_them(acme):
    site = locate("acme:Closed.shifted", acme)
    text = unified_diff([(site, {"one": Edit("x + offset", "x or offset")})])
    assert "return (x or offset) > 1" in text
