"""Ranks: mesh, process groups, collectives, devices, rendezvous, and failures that all ranks are told."""
