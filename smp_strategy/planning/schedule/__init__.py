"""Schedules: the order of forwards and backwards on each stage."""
