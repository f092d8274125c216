"""Some random networks, of the many that ``python -m tests.fuzz captures`` draws."""

from __future__ import annotations

from collections import Counter

import pytest

from sparseconv.nn.capturing import padding, verify
from tests.fuzz import captures


def test_some_captured_networks_are_the_eager_ones() -> None:
    ended = Counter(captures.run(0, number) for number in range(8))
    assert set(ended) <= {"replayed", "eager", "refused by torch"}, ended
    assert ended["replayed"] > 4, ended


@pytest.mark.parametrize("is_compared", [True, False])
def test_a_difference_is_seen(is_compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms whose statistics move twice as far in graphs: no result shows it, and the first replay's check does."""
    run = padding.batch_norm_of_rows

    def faster(x, count, weight, bias, mean, var, momentum, *rest):
        return run(x, count, weight, bias, mean, var, 2 * momentum, *rest)

    monkeypatch.setattr(padding, "batch_norm_of_rows", faster)
    monkeypatch.setattr(captures, "MODES", ("training",))
    if not is_compared:
        monkeypatch.setattr(verify, "against_eager", lambda recording, call, given, scene: None)
        assert any(captures.run(0, number).startswith("different: buffer") for number in range(8))
    else:
        assert "eager" in {captures.run(0, number) for number in range(3)}
