"""Reproductions: small programs that are wrong on stock DeepSpeed and right with their fix.

One module a fix, of the same name. It has ``MEASURES`` (one line: what the error is),
``TOLERANCE`` (the largest right error) and ``run() -> float`` (the error of the DeepSpeed that is
installed, patched or not: a reproduction does not know which).
"""
