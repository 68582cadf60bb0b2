"""Repairs a stock DeepSpeed in memory.

``import zerofix``, before or after ``import deepspeed`` and before ``deepspeed.initialize``,
applies the fixes that the installed release needs. Nothing on disk changes.
"""

from zerofix.install import NotAppliedError, Patcher, RanksDifferError
from zerofix.launch import forward_settings
from zerofix.patches import CATALOGUE
from zerofix.settings import SettingsError, read

__all__ = [
    "NotAppliedError",
    "RanksDifferError",
    "SettingsError",
    "__version__",
    "apply",
    "revert",
    "status",
]
__version__ = "0.1.0"

if "_patcher" not in globals():  # a reload keeps what knows how to revert
    _patcher = Patcher(CATALOGUE, read([fix.name for fix in CATALOGUE]), __version__)
    _patcher.activate()
    forward_settings()

apply = _patcher.apply
revert = _patcher.revert
status = _patcher.status
