"""Waiting for other ranks: every wait is watched, so that one that can never end is told within seconds."""
