"""What all tests share: hypothesis without a clock, and one thread of torch for each worker."""

import os

import torch
from hypothesis import settings

settings.register_profile("sparseconv", deadline=None, max_examples=60, print_blob=True, derandomize=True)
settings.load_profile("sparseconv")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
