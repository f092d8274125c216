"""Some random geometries, of the many that ``python -m tests.fuzz geometries`` draws."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz import geometries, workers


def test_some_geometries_are_those_of_the_oracle() -> None:
    ended = Counter(geometries.run(2, number) for number in range(200))
    assert set(ended) == {"the same", "refused"}, ended
    assert ended["the same"] > 100


def test_padding_that_moves_the_window_far_away() -> None:
    rows = [(0, 0, 1, -2, 1 - 2**31), (0, 0, -2, 3, -3), (1, -1, 4, -3, -1), (1, -2, -2, 0, 2)]
    options = {"kernel_size": (2, 1, 2, 1), "stride": (1, 2, 1, 1), "dilation": (2, 2, 1, 1), "target": None}
    for far in (-(2**30), 2**30 - 8, 64):
        options |= {"padding": (far, 3, 1, 3), "boundary": ("absent", None), "backend": None}
        case = geometries.Case("plan", 4, rows, 2, True, options)
        assert geometries._plan_by_package(case) == geometries._plan_by_oracle(case)


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = geometries._plan_by_package

    def lost(case: geometries.Case) -> dict:
        answer = plain(case)
        answer["edges"] = answer["edges"][1:]
        return answer

    monkeypatch.setattr(geometries, "_plan_by_package", lost)
    ended = {geometries.run(2, number) for number in range(60)}
    assert "different: ['edges']" in ended


def end(seed: int, number: int) -> str:
    """Ends the process at one number and never ends at another."""
    if number == 2:
        import os

        os._exit(11)
    if number == 4:
        import time

        time.sleep(600)
    return str(number)


def test_crashes_and_hangs_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LIMIT", 3.0)
    assert workers.answers(end, 6, 0) == ["0", "1", "crash", "3", "hang", "5"]
