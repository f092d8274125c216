"""The tests of `any_device`, in a process of their own: torch takes a new device only before its first gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked


def test_the_eager_path_on_a_device_of_another_type():
    path = Path(__file__).with_name("any_device.py")
    root = Path(__file__).parents[2]
    done = forked.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", path, folder=root)
    if "skipped" in done.stdout and "passed" not in done.stdout:
        pytest.skip("this torch has no devices written in Python")
    assert done.returncode == 0, done.stdout[-4000:]
