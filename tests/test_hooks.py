import importlib
import sys
import threading

import pytest

from zerofix import hooks


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules, and forgets them and their callbacks afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)
        hooks._callbacks.pop(name, None)


def test_a_module_that_is_there_calls_back_at_once(package):
    package("hook_a", "x = 1")
    import hook_a  # noqa: F401

    called = []
    hooks.when_imported("hook_a", called.append)
    assert called == ["hook_a"]


def test_a_later_import_calls_back_when_the_module_is_complete(package):
    package("hook_b", "x = 1")
    seen = []
    hooks.when_imported("hook_b", lambda name: seen.append(sys.modules[name].x))
    assert seen == []
    module = importlib.import_module("hook_b")
    assert seen == [1]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader


def test_a_reload_calls_back_again(package):
    package("hook_c", "x = object()")
    seen = []
    hooks.when_imported("hook_c", lambda name: seen.append(sys.modules[name].x))
    module = importlib.import_module("hook_c")
    importlib.reload(module)
    assert len(set(seen)) == 2


def test_a_half_imported_module_calls_back_at_its_end(package):
    """The module itself asks for the callback, before it is complete."""
    package(
        "hook_d",
        "from zerofix import hooks\nhooks.when_imported('hook_d', SEEN)\nx = 1",
    )
    seen = []
    import builtins

    builtins.SEEN = lambda name: seen.append(sys.modules[name].x)
    try:
        module = importlib.import_module("hook_d")
    finally:
        del builtins.SEEN
    assert seen == [1]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert module.__spec__._initializing is False


def test_a_half_import_in_another_thread_calls_back_in_that_thread(package):
    package(
        "hook_e",
        "import threading\nbegun = HOOK_E_BEGUN; begun.set(); HOOK_E_GO.wait(10)\n"
        "x = threading.current_thread().name",
    )
    import builtins

    builtins.HOOK_E_BEGUN, builtins.HOOK_E_GO = threading.Event(), threading.Event()
    thread = threading.Thread(target=importlib.import_module, args=("hook_e",), name="importer")
    thread.start()
    assert builtins.HOOK_E_BEGUN.wait(10)
    seen = []
    hooks.when_imported(
        "hook_e",
        lambda name: seen.append((sys.modules[name].x, threading.current_thread().name)),
    )
    assert seen == []
    builtins.HOOK_E_GO.set()
    thread.join(10)
    assert seen == [("importer", "importer")]


def test_two_who_wait_for_a_half_import_leave_no_trace(package):
    package(
        "hook_i",
        "from zerofix import hooks\nhooks.when_imported('hook_i', len)\n"
        "hooks.when_imported('hook_i', len)",
    )
    module = importlib.import_module("hook_i")
    assert type(module.__spec__) is importlib.machinery.ModuleSpec


def test_a_watched_modules_spec_can_be_copied(package):
    import copy
    import importlib.util

    package("hook_j", "x = 1")
    hooks.when_imported("hook_j", print)
    spec = copy.deepcopy(importlib.util.find_spec("hook_j"))
    assert spec.loader.get_source("hook_j") == "x = 1"


def test_a_failed_half_import_does_not_call_back(package):
    package("hook_f", "from zerofix import hooks\nhooks.when_imported('hook_f', print)\n1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("hook_f")
    assert "hook_f" not in sys.modules


@pytest.mark.parametrize("half", [False, True])
def test_what_the_callback_raises_fails_the_import_each_time(package, half):
    def refuse(name):
        raise RuntimeError("refused")

    if half:
        import builtins

        builtins.REFUSE = refuse
        package("hook_g", "from zerofix import hooks\nhooks.when_imported('hook_g', REFUSE)")
    else:
        package("hook_g", "x = 1")
        hooks.when_imported("hook_g", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            importlib.import_module("hook_g")
        assert "hook_g" not in sys.modules


def test_other_hooks_of_this_kind_work_beside_ours(package):
    """Finders like wrapt's ask the import system for the spec again."""
    import importlib.util

    package("hook_h", "x = 1")
    seen = []

    class Other:
        asking = False

        def find_spec(self, name, path=None, target=None):
            if name != "hook_h" or self.asking:
                return None
            self.asking = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking = False

    hooks.when_imported("hook_h", seen.append)
    for position in (0, len(sys.meta_path)):
        other = Other()
        sys.meta_path.insert(position, other)
        try:
            importlib.import_module("hook_h")
        finally:
            sys.meta_path.remove(other)
        sys.modules.pop("hook_h")
    assert seen == ["hook_h", "hook_h"]
