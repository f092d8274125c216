"""The memory that a graph's streams begin with."""

from __future__ import annotations

import pytest

from sparseconv.gpu.graphs import PIECE, TRIES, _Cut

MIB = 1 << 20


@pytest.mark.parametrize("known", [True, False], ids=["live bytes", "nothing"])
@pytest.mark.parametrize("enough", [0, 6, 44, 60, 96, 400])
def test_a_piece_is_found_that_is_little_more_than_enough(enough, known):
    """Pieces that are too small are in vain: what is missing comes in segments of 20 MiB."""

    def held(piece):
        missing = max(0, enough * MIB - piece)
        return piece + -(-missing // (20 * MIB)) * 20 * MIB

    cut = _Cut(enough * MIB * 9 // 10 if known else 0)
    seen = []
    for _ in range(TRIES):
        tried = cut.piece
        seen.append(held(tried))
        cut.seen(seen[-1])
        if cut.settled:
            assert tried == cut.best
            break
    assert held(cut.best) == min(seen)
    assert held(cut.best) <= max(12 * MIB, enough * MIB * 1.04 + 2 * PIECE)
    assert cut.best % PIECE == 0


def test_what_torch_took_alone_is_kept_where_no_piece_is_better():
    cut = _Cut(0)
    for _ in range(TRIES):
        cut.seen(50 * MIB if not cut.piece else cut.piece + 60 * MIB)
    assert cut.best == 0
