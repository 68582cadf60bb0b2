"""The catalogue of fixes, in the order in which they are applied."""

from zerofix.fix import Fix
from zerofix.patches import copy_grads, grad_accumulation

CATALOGUE: tuple[Fix, ...] = (copy_grads.FIX, grad_accumulation.FIX)
