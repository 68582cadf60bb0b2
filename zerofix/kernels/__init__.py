"""Copies of gradients into buckets: many at once, by a Triton kernel or by torch.

``zerofix.kernels.pack`` copies, ``zerofix.kernels.pending`` collects what to copy. Neither needs
Triton, and ``import zerofix`` imports nothing of this.
"""
