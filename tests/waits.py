"""A part of a test in which nothing may wait for the card."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits(mode: str = "error") -> Iterator[None]:
    """Whatever waits for the card raises; afterwards it may again. ``mode`` is that of torch's check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the check is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
