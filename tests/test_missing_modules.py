"""Modules of DeepSpeed that a release does not have."""

import importlib
import sys

from zerofix.install import _may_come


def test_a_package_is_not_imported_to_know_whether_a_module_may_come(tmp_path, monkeypatch):
    package = tmp_path / "above"
    (package / "below").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "alone.py").write_text("")
    (package / "below" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("above.alone")

    assert _may_come("above.below")
    assert _may_come("above.below.module")
    assert not _may_come("above.gone")
    assert not _may_come("above.gone.module")
    assert not _may_come("above.alone.module")
    assert not _may_come("gone.module")
    names = [name for name in sys.modules if name.startswith("above")]
    for name in names:
        del sys.modules[name]
    assert names == ["above", "above.alone"]
