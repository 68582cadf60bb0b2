"""Gradient buckets on a device."""
