"""One OpenMP thread before anything computes: forked ranks hang otherwise (and share two cores)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

from hypothesis import settings  # noqa: E402

settings.register_profile("suite", max_examples=50, deadline=None)
settings.load_profile("suite")
