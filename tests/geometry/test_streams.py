"""Who waits for whom beside a run: streams that know what was launched before what is launched on them next."""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import contextmanager

import pytest
import torch

from sparseconv.gpu import streams
from sparseconv.gpu.streams import SideStreams, edge_stream, list_stream, map_stream

HERE = torch.device("cpu")


class Stream:
    """What its next launch comes after."""

    _names = itertools.count()

    def __init__(self, device=HERE, priority=0):
        self.device, self.before = device, set()

    def launch(self):
        name = next(self._names)
        self.before.add(name)
        return name

    def wait_stream(self, other):
        self.before |= other.before

    def record_event(self):
        return frozenset(self.before)

    def wait_event(self, event):
        self.before |= event


@pytest.fixture
def features(monkeypatch):
    """The stream of a run, and `torch.cuda` over such streams."""
    stack = [Stream()]

    @contextmanager
    def on(stream):
        stack.append(stream)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stack[-1])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    return stack[0]


def in_a_run(call):
    with SideStreams(HERE).run():
        call()


def launch():
    return torch.cuda.current_stream().launch()


def test_features_wait_for_maps_and_maps_for_no_features(features):
    scene = launch()
    beside = SideStreams(HERE)
    with beside.run():
        feature = launch()
        with map_stream() as now:
            assert now is beside
            table = launch()
            with map_stream():  # in the same queue
                search = launch()
            assert scene in torch.cuda.current_stream().before
            assert feature not in torch.cuda.current_stream().before
        assert {table, search} <= features.before
    assert streams.current() is None
    with map_stream() as now:
        assert now is None
        assert torch.cuda.current_stream() is features


def test_what_was_built_is_kept_until_the_run_ends(features):
    class Built:
        pass

    built = [Built()]
    gone = weakref.ref(built[0])

    def fails():
        with map_stream() as now:
            now.keep(built.pop())
        gc.collect()
        assert gone() is not None
        raise KeyError

    with pytest.raises(KeyError):
        in_a_run(fails)
    gc.collect()
    assert gone() is None  # a run that fails leaves nothing behind
    assert streams.current() is None


def test_maps_wait_for_no_lists(features):
    beside = SideStreams(HERE)
    with beside.run():
        with map_stream():
            table = launch()
        with list_stream():
            assert table in torch.cuda.current_stream().before
            with map_stream():  # a sort that a list needs
                order = launch()
            assert order in torch.cuda.current_stream().before
            tiles = launch()
        assert tiles in features.before
        with map_stream():
            assert tiles not in torch.cuda.current_stream().before
    assert tiles in features.before


def test_edges_wait_for_their_search_alone_and_features_for_them(features):
    with SideStreams(HERE).run(), map_stream() as earlier:
        launch()
        past = earlier.moment()
    beside = SideStreams(HERE)
    with beside.run():
        with map_stream():
            search = launch()
            found = beside.moment()
            order = launch()
        with list_stream():
            tiles = launch()
        with edge_stream(found):
            assert search in torch.cuda.current_stream().before
            assert not {order, tiles} & torch.cuda.current_stream().before
            pairs = launch()
        assert pairs in features.before
        with map_stream():  # the next map
            assert pairs not in torch.cuda.current_stream().before
        with edge_stream(past):  # a moment of another run says nothing of this one
            assert order in torch.cuda.current_stream().before
    with edge_stream(found) as now:
        assert now is None


def test_what_edges_read_is_kept_until_maps_may_take_its_memory(features):
    beside = SideStreams(HERE)
    with beside.run():
        with map_stream():
            launch()
        with edge_stream(beside.moment()):
            pairs = launch()
        beside.retire(torch.zeros(1))
        assert pairs not in beside._maps.before
        beside.retire(torch.zeros(1))
        assert pairs in beside._maps.before


def test_what_lists_read_is_kept_until_maps_may_take_its_memory(features):
    beside = SideStreams(HERE)
    with beside.run():
        first, second = torch.zeros(1), torch.zeros(1)
        gone = weakref.ref(first)
        with list_stream():
            tiles = launch()
            beside.retire(first)
            del first
            pairs = launch()
        assert gone() is not None
        assert tiles not in beside._maps.before
        beside.retire(second)
        assert gone() is None
        assert tiles in beside._maps.before
        assert pairs not in beside._maps.before


def test_sums_fall_behind_until_the_next_or_the_end(features):
    beside = SideStreams(HERE)
    sums = []

    def summed(*operands):
        def run():
            sums.append(launch())
            with map_stream():
                table = launch()
            assert table in torch.cuda.current_stream().before
            return torch.zeros(len(sums))

        return beside.summed(run, *operands)

    with beside.run():
        before, operand = launch(), torch.zeros(3)
        kept = weakref.ref(operand)
        one = summed(operand)
        del operand
        assert sums[0] not in features.before
        assert before in beside._sums.before
        assert kept() is not None
        two = summed(torch.zeros(3))
        assert sums[0] in features.before
        assert sums[1] not in features.before
        assert kept() is None
        beside.settle([None, two, one])
        assert sums[1] in features.before
        assert not beside.mixed
        third = summed(torch.zeros(3))
        beside.settle([third + 1])  # somebody added to it before it was there
        assert beside.mixed
    alone = SideStreams(HERE, summed=False)
    with alone.run():
        alone.summed(lambda: sums.append(launch()) or torch.zeros(1), torch.zeros(1))
        assert sums[-1] in features.before
        alone.settle([])
        assert not alone.mixed


def test_memory_of_sums_is_that_of_the_features(features):
    """What features may write again begins after what a sum reads; it is kept until they wait."""
    beside = SideStreams(HERE)
    on = []

    class Memory(torch.Tensor):
        def __new__(cls, *size, **_):
            on.append(torch.cuda.current_stream())
            return torch.zeros(*size).as_subclass(cls)

    def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda size, **_: Memory(*size))
            memory = streams.scratch(3, dtype=torch.float32, device=HERE)
        assert torch.cuda.current_stream() is beside._sums
        kept.append(weakref.ref(memory))
        return torch.zeros(1)

    kept = []
    with beside.run():
        beside.summed(run, torch.zeros(1))
        assert on == [features]
        assert kept[0]() is not None
        beside.catch_up()
        assert kept[0]() is None
    assert streams.scratch(2, 3, dtype=torch.int32, device=HERE).shape == (2, 3)
