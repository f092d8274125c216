"""What all tests share: hypothesis without a clock, one thread of torch for each worker, and Triton's interpreter where
there is no GPU, which must be said before Triton is first imported."""

import os
import sys

import torch
from hypothesis import settings

from tests.interpreter import hasten

settings.register_profile("sparseconv", deadline=None, max_examples=60, print_blob=True, derandomize=True)
settings.load_profile("sparseconv")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    hasten()
