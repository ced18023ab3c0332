"""Profiling: units are timed on the device that trains them."""
