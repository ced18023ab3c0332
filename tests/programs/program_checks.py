"""Run a program plainly in one process and on N ranks, and compare what it returns."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from smp_strategy.testing import run_ranks

__all__ = ["LAYOUTS", "PP2", "alone", "assert_alike", "on_ranks"]

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS = {"pp2": PP2, "sdp2": {"sharded_data_parallel_degree": 2}, "tp2": {"tensor_parallel_degree": 2}}


def on_ranks(body, world_size, *args, timeout=250.0, **kwargs):
    """``body`` on ranks of a process group."""
    return run_ranks(_quietly, world_size, body, args, kwargs, timeout=timeout)


def alone(body, *args, **kwargs):
    """``body`` in one process of its own, that knows of no other."""
    return on_ranks(_without_group, 1, body, args, kwargs)[0]


def _without_group(body, args, kwargs):
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return body(*args, **kwargs)


def _quietly(body, args, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return body(*args, **kwargs)


def assert_alike(found, expected, *, rel=1e-4, floor=1e-5, where=""):
    """Nests of tensors and plain values agree, numbers up to rounding."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=rel, atol=floor, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(found[name], value, rel=rel, floor=floor, where=f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, rel=rel, floor=floor, where=f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, abs=floor, nan_ok=True), where
    else:
        assert found == expected, where
