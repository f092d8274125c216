"""The edges of a sparse convolution: which input row meets which output row through which tap."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparseconv import transforms
from sparseconv.checks import checked_device
from sparseconv.device_mixin import Movable
from sparseconv.geometry.gpu.lists import WorkLists
from sparseconv.gpu.streams import edge_stream, map_stream

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64, Integer

    from sparseconv.geometry.gpu.edge_lists import FoundEdges, ReversedEdges
    from sparseconv.products import SparseProductInfo


class MapSizes(NamedTuple):
    """Rows and pairs of a kernel map."""

    num_in: int
    num_out: int
    num_pairs: int


if TYPE_CHECKING:
    kept_property = cached_property
else:

    class kept_property(cached_property):
        """As functools', but two threads that ask at once both get what is kept first: launches hold addresses."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            found = instance.__dict__.get(self.attrname)
            return instance.__dict__.setdefault(self.attrname, self.func(instance)) if found is None else found


def _within(rows: torch.Tensor, count: int) -> bool:
    low, high = torch.stack(torch.aminmax(rows)).tolist()
    return low >= 0 and high < count


class KernelMap(Movable):
    """Edges (tap, input row, output row), in the orders that execution needs.

        y[out] = sum over edges (k, in, out) of x[in] @ weight[k]

    Within one tap every input row and every output row occurs at most once, so a tap is a partial injection and
    its scatter needs no atomics. One of two forms is given, the other is derived on first use and kept:

    - ``neighbors`` (K, N_out) int32: the input row that an output row meets through tap k, -1 where there is none;
    - ``in_rows``, ``out_rows`` (P,) int32 ordered by tap, with ``tap_offsets`` (K+1,) int64 on the map's device and
      ``tap_counts``, edges per tap, on the CPU.

    Two voxels side by side on a line, and three taps:

    >>> neighbors = torch.tensor([[-1, 0], [0, 1], [1, -1]], dtype=torch.int32)
    >>> line = KernelMap(2, 2, 3, neighbors=neighbors, identity_tap=1, mirror=(2, 1, 0))
    >>> line.in_rows.tolist(), line.out_rows.tolist(), line.tap_offsets.tolist()
    ([0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 3, 4])
    >>> line.reverse().neighbors.tolist()
    [[1, -1], [0, 1], [-1, 0]]
    """

    #: the map that this one is a part of, by whose sizes kernels are chosen: rows are then summed as they are there
    part_of: MapSizes | None = None

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_taps: int,
        *,
        neighbors: Int32[torch.Tensor, "K N_out"] | None = None,
        pairs: tuple[Int32[torch.Tensor, " P"], Int32[torch.Tensor, " P"], Int64[torch.Tensor, " K+1"]] | None = None,
        source: FoundEdges | ReversedEdges | None = None,
        identity_tap: int | None = None,
        mirror: tuple[int, ...] | None = None,
    ) -> None:
        self.num_in, self.num_out, self.num_taps = num_in, num_out, num_taps
        #: the tap that maps every row to itself, known from the geometry and never guessed from sizes; or None
        self.identity_tap = identity_tap
        #: mirror[k] is the tap whose edges are those of tap k reversed; None where the map has no such symmetry
        self.mirror = mirror
        #: whether each input row has exactly one edge, known from the geometry (windows side by side); else unknown
        self.meets_all = False
        #: schedules and jobs, where backends on a GPU have asked for them
        self.work_lists = WorkLists()
        #: what backends derive from the edges and keep (wider indices, bound launches), under keys of their own
        self.prepared: dict[Any, Any] = {}
        #: the reverse, which this map holds; or the map that this is the reverse of, weakly: both go with the last plan
        self._reverse: KernelMap | None = None
        self._reverse_of: weakref.ref[KernelMap] | None = None
        #: edges that were found but not written down yet; both forms are written on first use
        self.source = source
        if source is not None:
            self.device = source.device
        elif neighbors is not None:
            self.device = neighbors.device
        elif pairs is not None:
            self.device = pairs[0].device
        else:
            raise ValueError("a KernelMap is made from neighbors, from pairs or from a source: give one of them")
        if neighbors is not None:
            if neighbors.shape != (num_taps, num_out):
                raise ValueError(f"neighbors must be ({num_taps}, {num_out}), taps and outputs; got {neighbors.shape}")
            self.__dict__["neighbors"] = neighbors
        if pairs is not None:
            in_rows, out_rows, offsets = pairs
            if in_rows.shape != out_rows.shape or offsets.shape != (num_taps + 1,):
                shapes = [tuple(part.shape) for part in pairs]
                raise ValueError(f"pairs must be (P,), (P,) and ({num_taps + 1},) for {num_taps} taps; got {shapes}")
            self.__dict__["pairs"] = pairs

    @kept_property
    @transforms.constant
    def neighbors(self) -> Int32[torch.Tensor, "K N_out"]:
        """(K, N_out) int32: the input row of each output row through each tap, -1 where there is none."""
        twin = self._twin()
        if twin is not None and self.mirror is not None and "neighbors" in twin.__dict__:
            if self.mirror == tuple(reversed(range(self.num_taps))):
                with map_stream():
                    return twin.neighbors.flip(0)
            with map_stream():  # by no index that a graph could not copy
                return torch.stack([twin.neighbors[tap] for tap in self.mirror])
        if self.source is not None and (self.padded or "pairs" not in self.__dict__):
            with map_stream():
                return self.source.neighbors
        in_rows, out_rows, _ = self.pairs
        table = torch.full((self.num_taps, self.num_out), -1, dtype=torch.int32, device=in_rows.device)
        table.view(-1)[self.pair_taps.long() * self.num_out + out_rows] = in_rows
        return table

    @kept_property
    @transforms.constant
    def pairs(self) -> tuple[Int32[torch.Tensor, " P"], Int32[torch.Tensor, " P"], Int64[torch.Tensor, " K+1"]]:
        """``in_rows``, ``out_rows`` and ``tap_offsets``."""
        if self.source is not None:
            twin = self._twin()
            if twin is not None and "pairs" in twin.__dict__:
                out_rows, in_rows, offsets = twin.pairs
                return in_rows, out_rows, offsets
            with edge_stream(self.source.moment):
                in_rows, out_rows, offsets = self.source.pairs()
            if twin is not None:  # both directions read the same arrays
                twin.__dict__.setdefault("pairs", (out_rows, in_rows, offsets))
            return in_rows, out_rows, offsets
        table = self.neighbors
        live = table >= 0
        offsets = torch.zeros(self.num_taps + 1, dtype=torch.int64, device=table.device)
        torch.cumsum(live.sum(1), 0, out=offsets[1:])
        return table[live], live.nonzero()[:, 1].int(), offsets

    @property
    def padded(self) -> bool:
        """Whether the pairs end at ``tap_offsets[K]``, which the device alone knows, and not with their arrays.

        So it is between grids of fixed size on a GPU: ``num_pairs`` is then an estimate, and what would have to know
        the edges one by one is a RuntimeError.
        """
        return self.source is not None and self.source.padded

    def list_pairs(self) -> None:
        """Write a padded map's pairs now, for a gradient to come: a fault that they raise is then known before it."""
        if self.source is not None and self.source.padded:
            self.half_pairs if self.is_halved else self.pairs  # noqa: B018 (kept)

    @property
    def is_halved(self) -> bool:
        """Whether `half_pairs` says it all: rows of one grid, 3 x 3 x 3 cells around each, on a GPU."""
        return self.source is not None and self.source.is_halved

    @kept_property
    @transforms.constant
    def half_pairs(
        self,
    ) -> tuple[Int32[torch.Tensor, " P_half"], Int32[torch.Tensor, " P_half"], Int64[torch.Tensor, " K+1"]]:
        """in_rows and out_rows of the taps up to the middle one, and the tap_offsets (K+1,) of all taps.

        Of a map that `is_halved`: the edges of tap K - 1 - k are those of tap k turned round, one by one. More edges
        may follow in these arrays.
        """
        source = self.source
        if source is None or "pairs" in self.__dict__:
            return self.pairs
        twin = self._twin()
        if twin is not None and "half_pairs" in twin.__dict__:  # both directions read the same arrays
            out_rows, in_rows, offsets = twin.half_pairs
            return in_rows, out_rows, offsets
        with edge_stream(source.moment):
            return source.half_pairs()

    def _counted(self) -> None:
        if self.padded:
            self.tap_counts  # noqa: B018 (raises)

    @property
    def in_rows(self) -> Int32[torch.Tensor, " P"]:
        """(P,) int32: the input row of each edge, by tap."""
        return self.pairs[0]

    @property
    def out_rows(self) -> Int32[torch.Tensor, " P"]:
        """(P,) int32: the output row of each edge, by tap."""
        return self.pairs[1]

    @property
    def tap_offsets(self) -> Int64[torch.Tensor, " K+1"]:
        """(K+1,) int64 on the map's device: tap k owns the edges [tap_offsets[k], tap_offsets[k+1])."""
        return self.pairs[2]

    @cached_property
    @transforms.constant
    def pair_taps(self) -> Int32[torch.Tensor, " P"]:
        """(P,) int32: the tap of each edge, ascending."""
        self._counted()
        taps = torch.arange(self.num_taps, dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(taps, self.tap_offsets.diff(), output_size=len(self.in_rows))

    @cached_property
    @transforms.constant
    def by_output(self) -> tuple[Integer[torch.Tensor, " P"], Int64[torch.Tensor, " N_out+1"]]:
        """The edges by output row: their order (P,) int32 (by tap within a row), and where each row begins (N_out+1,).

        The order is int64 where there are 2^31 edges or more; ``reverse().by_output`` is the order by input row.
        """
        self._counted()
        rows, order = torch.sort(self.out_rows, stable=True)
        bounds = torch.arange(self.num_out + 1, dtype=torch.int32, device=rows.device)
        return order.int() if len(rows) < 2**31 else order, torch.searchsorted(rows, bounds)

    def product_infos(self) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
        """The edges as the infos of a sparse product of input rows and taps, (forward, backward1, backward2).

            sparse_vecmat(x, weight, *product_infos())[out] = sum over edges (k, in, out) of x[in] @ weight[k]

        Their columns are this map's own arrays, read through ``gather_index`` where an order by rows is needed; made
        on first use and kept. A convolution over the map is this product, a depthwise one is `sparse_mul`.

        >>> from sparseconv.products import sparse_mul
        >>> neighbors = torch.tensor([[-1, 0], [0, 1], [1, -1]], dtype=torch.int32)
        >>> line = KernelMap(2, 2, 3, neighbors=neighbors)
        >>> x, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [10.0], [100.0]])
        >>> sparse_mul(x, weight, *line.product_infos()).tolist()
        [[210.0], [21.0]]
        """
        return self._product_infos

    @cached_property
    @transforms.constant
    def _product_infos(self) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
        from sparseconv.products.info import SparseProductInfo, known_right  # same floor, imported on demand

        ins, taps, outs = self.in_rows, self.pair_taps, self.out_rows
        num_in, num_taps, num_out = self.num_in, self.num_taps, self.num_out
        (out_order, out_bounds), (in_order, in_bounds) = self.by_output, self.reverse().by_output
        return (
            known_right(SparseProductInfo, None, ins, taps, out_bounds, out_order, None, num_out, num_in, num_taps),
            known_right(SparseProductInfo, None, taps, outs, in_bounds, in_order, None, num_in, num_taps, num_out),
            known_right(SparseProductInfo, None, outs, ins, self.tap_offsets, None, None, num_taps, num_out, num_in),
        )

    @cached_property
    @transforms.constant
    def tap_counts(self) -> tuple[int, ...]:
        """Edges of each tap, on the CPU (the first reading waits for the device)."""
        return tuple(self.pairs[2].diff().tolist()) if self.source is None else self.source.counts()

    @cached_property
    def num_pairs(self) -> int:
        """P, the number of edges."""
        return len(self.pairs[0]) if self.source is None else self.source.total()

    @cached_property
    def max_pairs_per_tap(self) -> int:
        """The rows of the largest gather buffer that any tap needs."""
        return max(self.tap_counts, default=0)

    @cached_property
    @transforms.constant
    def coverage(self) -> Int64[torch.Tensor, " K+1"]:
        """(K+1,) int64 on the CPU: how many output rows have 0, 1, ..., K edges."""
        self._counted()
        degree = torch.bincount(self.out_rows.long(), minlength=self.num_out)
        return torch.bincount(degree, minlength=self.num_taps + 1).cpu()

    def reverse(self) -> KernelMap:
        """The same edges with input and output exchanged, in O(1); ``reverse().reverse()`` is this map."""
        twin = self._twin()
        if twin is None:
            sizes = self.num_out, self.num_in, self.num_taps
            symmetry = {"identity_tap": self.identity_tap, "mirror": self.mirror}
            source, pairs = None if self.source is None else self.source.reversed(), None
            if not self.padded and (source is None or "pairs" in self.__dict__):
                in_rows, out_rows, offsets = self.pairs
                pairs = out_rows, in_rows, offsets
            twin = KernelMap(*sizes, source=source, pairs=pairs, **symmetry)  # type: ignore[arg-type]
            if "num_pairs" in self.__dict__:
                twin.num_pairs = self.num_pairs
            if self.part_of is not None:
                rows_in, rows_out, num_pairs = self.part_of
                twin.part_of = MapSizes(rows_out, rows_in, num_pairs)
            twin._reverse_of = weakref.ref(self)
            self._reverse, self._reverse_of = twin, None
        return twin

    def _twin(self) -> KernelMap | None:
        """The reverse if there is one."""
        return self._reverse if self._reverse_of is None else self._reverse_of()

    def to(self, device: torch.device | str) -> KernelMap:
        """This map with its edges on another device; returns itself if they are already there."""
        if checked_device(device) == self.device:
            return self
        self._counted()
        in_rows, out_rows, offsets = (t.to(device) for t in self.pairs)
        return KernelMap(
            self.num_in,
            self.num_out,
            self.num_taps,
            pairs=(in_rows, out_rows, offsets),
            identity_tap=self.identity_tap,
            mirror=self.mirror,
        )

    def __getstate__(self) -> dict[str, Any]:
        self._counted()
        kept = ("num_in", "num_out", "num_taps", "identity_tap", "mirror", "meets_all", "pairs")
        self.pairs  # noqa: B018 (pairs are the form that travels: derive them if they are not there yet)
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        bare = {"prepared": {}, "work_lists": WorkLists(), "_reverse": None, "_reverse_of": None, "source": None}
        self.__dict__.update(state, **bare, device=state["pairs"][0].device)
        self._check()

    def _check(self) -> None:
        """Raise ValueError where edges of a file lead to rows or taps that are not there: kernels do not look."""
        in_rows, out_rows, offsets = self.pairs
        taps, count = range(self.num_taps), len(in_rows)
        steps = torch.cat([offsets.new_zeros(1), offsets, offsets.new_tensor([count])]).diff()
        right = (
            in_rows.dtype == out_rows.dtype == torch.int32
            and offsets.dtype == torch.int64
            and in_rows.shape == out_rows.shape == (count,)
            and offsets.shape == (self.num_taps + 1,)
            and bool((steps >= 0).all() & (steps[[0, -1]] == 0).all())
            and (count == 0 or all(_within(*pair) for pair in ((in_rows, self.num_in), (out_rows, self.num_out))))
            and (self.identity_tap is None or (self.identity_tap in taps and self.num_in == self.num_out))
            and (self.mirror is None or sorted(self.mirror) == list(taps))
        )
        if not right:
            raise ValueError(
                f"the file of a map of {self.num_in} to {self.num_out} rows by {len(taps)} taps is damaged"
            )

    def __repr__(self) -> str:
        mean = self.num_pairs / max(1, self.num_out)
        identity = "" if self.identity_tap is None else f", identity tap {self.identity_tap}"
        return (
            f"KernelMap({self.num_in:,} -> {self.num_out:,} rows, {self.num_taps} taps, {self.num_pairs:,} pairs, "
            f"{mean:.1f} an output{identity}, {self.device})"
        )
