"""Partitions: units to stages, by branch and bound."""
