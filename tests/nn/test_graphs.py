"""The memory that a graph's streams begin with."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sparseconv.gpu import graphs
from sparseconv.gpu.graphs import PIECE, TRIES, _Cut

MIB = 1 << 20


class Stream(NamedTuple):
    cuda_stream: int


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


@pytest.mark.parametrize("tries", [1, 2, 3, TRIES])
def test_the_capture_that_holds_least_is_returned(monkeypatch, tries):
    """Two streams, of which the second finds that no piece is better than none."""
    streams = [Stream(7), Stream(8)]
    alive, seen = [], []

    def capture(pieces):
        alive.clear()  # as a capture that follows another one must
        sizes = [pieces[s] for s in streams]
        holds = {7: max(sizes[0], 100 * MIB) + (30 * MIB if sizes[0] < 100 * MIB else 0), 8: 40 * MIB + sizes[1]}
        alive.append(holds)
        seen.append(sum(holds.values()))
        return holds, len(seen)

    monkeypatch.setattr(graphs, "_held", lambda graph: graph)
    graph, number = graphs.least_memory(capture, {streams[0]: 90 * MIB, streams[1]: 0}, tries)
    assert graph is alive[0]
    assert number == len(seen)
    assert sum(graph.values()) == min(seen)
    assert len(seen) <= tries + 1


def test_a_small_pool_is_captured_once(monkeypatch):
    calls = []
    monkeypatch.setattr(graphs, "_held", lambda graph: graph)
    graphs.least_memory(lambda pieces: ({7: 50 * MIB}, calls.append(pieces)), {Stream(7): 0}, 3, 64 * MIB)
    assert len(calls) == 1


def test_a_try_that_finds_no_memory_costs_no_capture(monkeypatch):
    tried = []

    def capture(pieces):
        tried.append(dict(pieces))
        if len(tried) == 2:
            raise torch.cuda.OutOfMemoryError
        return {7: 100 * MIB}, len(tried)

    monkeypatch.setattr(graphs, "_held", lambda graph: graph)
    assert graphs.least_memory(capture, {Stream(7): 0}, 3)[1] == 3
    assert tried[2] == tried[0] != tried[1]


def test_a_capture_that_finds_no_memory_at_first_says_so():
    def capture(pieces):
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        graphs.least_memory(capture, {Stream(7): 0}, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("broken", [True, False], ids=["waits", "raises"])
def test_a_capture_that_fails_leaves_torch_as_it_was(broken):
    """CUDA breaks off a capture in which something waits; torch's random numbers and memory then stayed those of it."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 22, device=device)

    def run():
        y = torch.nn.functional.dropout(x, 0.5)
        if broken:
            y.sum().item()
        raise ValueError("of the network")

    with pytest.raises((RuntimeError, ValueError)):
        graphs.graph_of(_Once(run), device)
    torch.cuda.synchronize()
    torch.manual_seed(3)
    first = torch.rand(1000, device=device)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1000, device=device), first)
    other, held = torch.cuda.Stream(), torch.cuda.memory_reserved()
    for _ in range(20):  # memory that another stream has read comes back
        y = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        y.record_stream(other)
        del y
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - held <= 128 << 20
    graph, kept = graphs.graph_of(lambda: torch.nn.functional.dropout(x, 0.5), device)
    graph.replay()
    first = kept.clone()
    graph.replay()
    assert not torch.equal(kept, first)
    assert abs(float(kept.mean()) - 1) < 0.01


@pytest.mark.gpu
def test_a_graph_that_becomes_garbage_does_not_break_off_the_capture_of_another():
    """CUDA refuses to destroy a graph while a stream is captured; the process ended."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 10, device=device)
    garbage = [graphs.graph_of(lambda: x + 1, device)[0]]
    garbage.append(garbage)
    del garbage

    def run():
        kept = [[i] for i in range(100_000)]  # containers, until the collector has looked at all of its generations
        return x * len(kept)

    graph, found = graphs.graph_of(run, device)
    graph.replay()
    assert torch.equal(found, x * 100_000)


class _Once:
    """A run that fails within the capture alone."""

    def __init__(self, run):
        self.run = run

    def __call__(self):
        if torch.cuda.is_current_stream_capturing():
            return self.run()
        return torch.zeros(1, device="cuda")
