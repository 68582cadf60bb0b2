"""Which line of the user's program an operation comes from."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch

INTERNAL = [os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<frozen"]
"""Beginnings of the file names that are passed over. An adapter adds the layers it knows."""


class Line(NamedTuple):
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def caller() -> Line:
    """The innermost Python line that is not torch's and not this package's.

    An operation of autograd has the line that called ``backward``.
    """
    frame = sys._getframe(1)
    internal = tuple(INTERNAL)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(internal)
        or frame.f_code.co_filename.endswith(("contextlib.py", "weakref.py"))
    ):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
