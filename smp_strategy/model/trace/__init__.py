"""Dry runs of calls on fake tensors: shapes, costs and side effects."""
