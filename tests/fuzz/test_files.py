"""A part of the fuzzers of files; the whole is ``python -m tests.fuzz clouds`` and ``checkpoints``."""

from __future__ import annotations

import faulthandler
import os
import time

import pytest

from tests.fuzz import _files as files
from tests.fuzz import checkpoints, clouds

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forks")


def test_the_judge_sees_what_it_looks_for(monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 5.0)

    def ends(number):
        if number == 1:
            faulthandler.disable()  # which would say so among the results of other tests
            os.abort()
        if number == 3:
            time.sleep(60)
        if number == 4:
            raise KeyError("other")
        if number == 5:
            raise ValueError("right")
        if number == 6:
            bytearray(2 * files.MEMORY)  # well beyond: what is let go of meanwhile makes room
        return "equal"

    counted, failures = files.run(lambda n: (f"number {n}", lambda: ends(n)), 8, processes=1)
    assert counted == {"equal": 3, "CRASHED": 1, "HUNG": 1, "RAISED": 1, "refused": 2}
    assert [line.split(":")[0] for line in failures] == [f"case {n}, number {n}" for n in (1, 3, 4)]


@pytest.mark.parametrize(("topic", "count"), [(clouds, 40), (checkpoints, 100)])
def test_changed_files_are_read_or_refused(topic, count):
    for package in ("laspy", "plyfile", "pypcd4", "safetensors"):
        pytest.importorskip(package)
    assert not topic.main(count, 1)
