"""Gradient buckets on a device: who writes and reads them when, and the copies into them.

``import zerofix`` imports nothing of this, and only ``pointer_table`` imports Triton.
"""
