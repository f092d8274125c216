"""Index projections against brute force over every point."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseconv import Boundary, IndexProjection, IndexRange

SMALL = st.integers(-3, 3)


def cells(box: IndexRange) -> set[tuple[int, ...]]:
    return set(box)


def seen(projection: IndexProjection, point: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The points of one region, with its step, from the definition alone."""
    start = [sum(a * p for a, p in zip(row, point)) + b for row, b in zip(projection.matrix, projection.offset)]
    axes = [range(s, s + n, d) for s, n, d in zip(start, projection.shape, projection.step)]
    return set(itertools.product(*axes))


def bounding(points: set[tuple[int, ...]]) -> IndexRange:
    columns = list(zip(*points))
    return IndexRange(tuple(min(c) for c in columns), tuple(max(c) + 1 for c in columns))


@st.composite
def projections(draw, rank_in=None, rank_out=None):
    n = rank_in or draw(st.integers(1, 3))
    m = rank_out or draw(st.integers(1, 3))
    matrix = tuple(tuple(draw(st.lists(SMALL, min_size=n, max_size=n))) for _ in range(m))
    counts = draw(st.lists(st.integers(1, 3), min_size=m, max_size=m))
    step = draw(st.lists(st.integers(1, 2), min_size=m, max_size=m))
    shape = tuple((c - 1) * d + 1 for c, d in zip(counts, step))
    return IndexProjection(matrix, tuple(draw(st.lists(SMALL, min_size=m, max_size=m))), shape, tuple(step))


@st.composite
def boxes(draw, rank):
    start = draw(st.lists(SMALL, min_size=rank, max_size=rank))
    return IndexRange(tuple(start), tuple(s + draw(st.integers(1, 3)) for s in start))


@given(st.data())
def test_a_range_sees_exactly_the_bounding_box_of_its_points(data):
    projection = data.draw(projections())
    box = data.draw(boxes(projection.rank_in))
    everything = set().union(*(seen(projection, p) for p in box))
    assert projection.region(box) == bounding(everything)


@given(projections())
def test_calling_gives_starts_and_taps_give_the_rest(projection):
    points = torch.tensor(list(IndexRange((-1,) * projection.rank_in, (2,) * projection.rank_in)))
    for point, start in zip(points, projection(points)):
        got = {tuple((start + tap).tolist()) for tap in projection.taps()}
        assert got == seen(projection, tuple(point.tolist()))
        assert projection.region(tuple(point.tolist())) == bounding(got)


@given(st.data())
def test_compose_sees_what_the_outer_sees_of_what_the_inner_sees(data):
    inner = data.draw(projections())
    outer = data.draw(projections(rank_in=inner.rank_out))
    both = outer.compose(inner)
    point = tuple(data.draw(st.lists(SMALL, min_size=inner.rank_in, max_size=inner.rank_in)))
    chained = set().union(*(seen(outer, q) for q in seen(inner, point)))
    assert both.region(point) == bounding(chained)
    assert chained <= seen(both, point)


@given(st.data())
def test_preimage_holds_exactly_the_points_that_meet_a_range(data):
    rank = data.draw(st.integers(1, 3))
    columns = data.draw(st.permutations(range(rank)))
    entries = data.draw(st.lists(st.sampled_from([-2, -1, 1, 2, 3]), min_size=rank, max_size=rank))
    matrix = tuple(tuple(entries[i] if j == columns[i] else 0 for j in range(rank)) for i in range(rank))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    projection = IndexProjection(matrix, tuple(data.draw(st.lists(SMALL, min_size=rank, max_size=rank))), shape)
    region = data.draw(boxes(rank))
    domain = IndexRange((-8,) * rank, (9,) * rank)
    want = {p for p in domain if projection.region(p).intersect(region).size}
    assert cells(projection.preimage(region)) & cells(domain) == want


@given(st.data())
def test_preimage_of_any_matrix_misses_no_point(data):
    projection = data.draw(projections())
    region = data.draw(boxes(projection.rank_out))
    domain = IndexRange((-3,) * projection.rank_in, (4,) * projection.rank_in)
    want = {p for p in domain if projection.region(p).intersect(region).size}
    assert want <= cells(projection.preimage(region, within=domain)) <= cells(domain)


@given(st.data())
def test_translate_permute_and_flip_move_every_point(data):
    projection = data.draw(projections())
    rank = projection.rank_out
    point = tuple(data.draw(st.lists(SMALL, min_size=projection.rank_in, max_size=projection.rank_in)))
    before = seen(projection, point)
    delta = data.draw(st.lists(SMALL, min_size=rank, max_size=rank))
    assert seen(projection.translate(delta), point) == {tuple(a + d for a, d in zip(q, delta)) for q in before}
    axes = data.draw(st.permutations(range(rank)))
    assert seen(projection.permute(axes), point) == {tuple(q[a] for a in axes) for q in before}
    axis = data.draw(st.integers(-rank, rank - 1))
    size = data.draw(st.integers(1, 9))
    mirrored = {tuple(size - 1 - v if i == axis % rank else v for i, v in enumerate(q)) for q in before}
    assert seen(projection.flip(axis, size), point) == mirrored
    assert projection.flip(axis, size).flip(axis, size) == projection


def with_anchors(draw, projection: IndexProjection, names: str) -> IndexProjection:
    box = IndexRange.of_shape(projection.shape)
    anchors = {n: tuple(draw(st.integers(a, b - 1)) for a, b in zip(box.start, box.end)) for n in names}
    return dataclasses.replace(projection, anchors=anchors)


@given(st.data())
def test_composed_anchors_are_the_anchors_of_anchors(data):
    inner = with_anchors(data.draw, data.draw(projections()), "ab")
    outer = with_anchors(data.draw, data.draw(projections(rank_in=inner.rank_out)), "bc")
    both = outer.compose(inner)
    point = torch.tensor([data.draw(st.lists(SMALL, min_size=inner.rank_in, max_size=inner.rank_in))])
    want = {"b": outer.anchor("b", inner.anchor("b", point))}
    if set(outer.shape) == {1}:
        want["a"] = outer(inner.anchor("a", point))
    if set(inner.shape) == {1}:
        want["c"] = outer.anchor("c", inner(point))
    assert set(both.anchors) == set(want)
    for name, place in want.items():
        assert torch.equal(both.anchor(name, point), place)


def test_the_centre_of_a_chain_of_windows():
    both = IndexProjection.window((3,), stride=2).compose(IndexProjection.window((4,), stride=3))
    points = torch.arange(-3, 4)[:, None]
    assert torch.equal(both.anchor("center", points), 6 * points)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_shape_that_ends_between_two_points_is_refused(shape, data):
    step = data.draw(st.lists(st.integers(1, 4), min_size=len(shape), max_size=len(shape)))
    rank = len(shape)
    identity = tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))
    points = [list(range(0, n, d)) for n, d in zip(shape, step)]
    if all(axis[-1] == n - 1 for axis, n in zip(points, shape)):
        projection = IndexProjection(identity, (0,) * rank, tuple(shape), tuple(step))
        assert seen(projection, (0,) * rank) == set(itertools.product(*points))
    else:
        with pytest.raises(ValueError, match="does not end on a point of step"):
            IndexProjection(identity, (0,) * rank, tuple(shape), tuple(step))


@pytest.mark.parametrize(
    "make",
    [
        lambda: IndexProjection(((1.9,),), (0,), (2,)),
        lambda: IndexProjection(((1,),), (0.7,), (2,)),
        lambda: IndexProjection(((1,),), (0,), (2.0,)),
        lambda: IndexProjection(((1,),), (0,), (3,), (2.0,)),
        lambda: IndexProjection(((1,),), (0,), (3,), anchors={"center": (0.5,)}),
        lambda: IndexProjection(((1,),), ("0",), (2,)),
        lambda: IndexProjection.linear((1.5,)),
        lambda: IndexProjection.window((3,), padding=0.5),
        lambda: IndexProjection.window((3,)).translate((0.5,)),
        lambda: IndexProjection.window((3,)).flip(0, 7.5),
        lambda: IndexProjection.window((3,)).permute((0.0,)),
        lambda: IndexRange((0.5,), (2,)),
        lambda: IndexRange((0,), (2.9,)),
        lambda: IndexRange.of_shape((2.5,)),
        lambda: IndexRange(0, 1),
        lambda: Boundary.periodic((2.5,)),
    ],
)
def test_floats_are_not_rounded(make):
    with pytest.raises(TypeError, match="integer"):
        make()


@given(st.integers(1, 3), st.data())
def test_anchors_stay_on_their_point(rank, data):
    kernel = data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    stride = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    window = IndexProjection.window(kernel, stride)
    points = torch.tensor([data.draw(st.lists(SMALL, min_size=rank, max_size=rank))])
    centre = points * torch.tensor(stride)
    assert torch.equal(window.anchor("center", points), centre)
    flipped = window.flip(0, 7).anchor("center", points)[0].tolist()
    assert flipped == [6 - int(centre[0, 0]), *centre[0, 1:].tolist()]
    axes = list(reversed(range(rank)))
    assert torch.equal(window.permute(axes).anchor("center", points), centre[:, axes])


@settings(max_examples=60)
@given(st.data())
def test_the_four_boundaries_on_dense_arrays(data):
    rank = data.draw(st.integers(1, 2))
    projection = data.draw(projections(rank, rank))
    array = torch.arange(1, 1 + 4**rank).reshape((4,) * rank)
    points = torch.tensor([data.draw(st.lists(SMALL, min_size=rank, max_size=rank)) for _ in range(3)])

    def element(kind: str, at: tuple[int, ...]) -> int:
        if kind == "periodic":
            return int(array[tuple(a % 4 for a in at)])
        if kind == "absent":
            return int(array[at]) if all(0 <= a < 4 for a in at) else -7
        low = -4 if kind == "negative" else 0
        if not all(low <= a < 4 for a in at):
            raise IndexError
        return int(array[at])

    for kind in ("absent", "periodic", "forbid", "negative"):
        regions = [[tuple((s + t).tolist()) for t in projection.taps()] for s in projection(points)]
        try:
            want = [[element(kind, at) for at in region] for region in regions]
        except IndexError:
            with pytest.raises(IndexError, match="out of bounds"):
                projection.gather(array, points, kind, fill=-7)
            continue
        assert projection.gather(array, points, kind, fill=-7).flatten(1).tolist() == want


def test_named_constructors():
    fixed = IndexProjection.fixed(2, start=(3, 4), shape=(2, 5))
    assert fixed.region((7, -7)) == fixed.region((0, 0)) == IndexRange((3, 4), (5, 9))
    backwards = IndexProjection.linear((-1,), offset=(9,))
    assert [backwards.region((i,)).start for i in range(3)] == [(9,), (8,), (7,)]
    rows = IndexProjection.reduce((4, 5, 6), axis=1)
    assert rows.region((2, 3)) == IndexRange((2, 0, 3), (3, 5, 4))
    window = IndexProjection.window((3, 2), stride=(2, 1), dilation=(2, 1))
    assert (window.offset, window.shape, window.counts) == ((-2, 0), (5, 2), (3, 2))


def test_the_transposed_window_is_a_preimage():
    window = IndexProjection.window((3,), stride=2, padding=1)
    for fine in range(-5, 6):
        want = [c for c in range(-9, 9) if any(2 * c + t - 1 == fine for t in range(3))]
        assert list(window.preimage(IndexRange((fine,), (fine + 1,)))) == [(c,) for c in want]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IndexProjection(((1, 0), (0,)), (0, 0), (1, 1)), "one length"),
        (lambda: IndexProjection(((1,),), (0, 0), (1,)), "offset must have 1"),
        (lambda: IndexProjection(((1,),), (0,), (0,)), "positive"),
        (lambda: IndexProjection.window((3, 0)), "at least 1"),
        (lambda: IndexProjection.window((3, 3), stride=(1, 2, 3)), "one for each axis"),
        (lambda: IndexProjection.window((3,)).region((1, 2)), "rank 1"),
        (lambda: IndexProjection.window((3,)).region(IndexRange((0,), (0,))), "empty range"),
        (lambda: IndexProjection.window((3,))(torch.zeros(2, 2, dtype=torch.int64)), "1 columns"),
        (lambda: IndexProjection.window((3,)).anchor("middle", torch.zeros(1, 1, dtype=torch.int64)), "no anchor"),
        (lambda: IndexProjection.window((3,)).compose(IndexProjection.window((3, 3))), "cannot compose"),
        (lambda: IndexProjection.reduce((3, 3), 2), "axis must be"),
        (lambda: IndexProjection.fixed(1, (0,), (2,)).preimage(IndexRange((0,), (1,))), "within="),
        (lambda: Boundary("mirror"), "'periodic'"),
        (lambda: IndexRange((0,), (1, 2)), "same rank"),
        (lambda: IndexRange((0, 0), (2, 2)).translate((1,)), "delta must be one integer or 2"),
        (lambda: IndexRange((0, 0), (2, 2)).intersect(IndexRange((0,), (1,))), "same rank"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_points_must_be_integers():
    with pytest.raises(TypeError, match="integers"):
        IndexProjection.window((3,))(torch.zeros(2, 1))


def test_a_box_of_fewer_axes_lies_in_no_other():
    box, line = IndexRange((0, 0), (2, 2)), IndexRange((0,), (1,))
    assert not box.encloses(line)
    assert not line.encloses(box)
    assert box.translate((1, -1)) == IndexRange((1, -1), (3, 1))


def test_an_index_space_without_axes_is_one_point():
    points = torch.zeros(2, 0, dtype=torch.int64)
    whole = IndexProjection.reduce((5,), 0)  # the sum of a vector
    assert whole(points).tolist() == [[0], [0]]
    assert whole.region(()) == whole.region(IndexRange((), ())) == IndexRange((0,), (5,))
    assert whole.preimage(IndexRange((1,), (3,))) == IndexRange((), ())
    assert whole.gather(torch.arange(5), points, "forbid").tolist() == [[0, 1, 2, 3, 4]] * 2
    assert whole.translate((3,)).gather(torch.arange(5), points, "periodic").tolist() == [[3, 4, 0, 1, 2]] * 2
    assert whole.compose(IndexProjection.fixed(0, (), ())) == whole
    box = IndexProjection.fixed(0, (1, 2), (1, 2))
    assert box.gather(torch.arange(12).view(3, 4), points, "absent").tolist() == [[[6, 7]]] * 2


def test_a_region_of_a_number_is_that_number():
    number = IndexProjection.fixed(0, (), ())
    assert number(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert number.taps().shape == (1, 0)
    assert number.gather(torch.tensor(3), torch.zeros(2, 0, dtype=torch.int64), "forbid").tolist() == [3, 3]
