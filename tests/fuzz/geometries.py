"""Random geometries, extreme ones too, each built by the package and by the oracle.

``python -m tests.fuzz geometries --count 20000 --seed 0``. A case is drawn from the seed and its number alone. What the
package answers must be what loops over Python's integers find, or a refusal in words: always where no answer fits 32
bits, and never where the case is an ordinary one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

import sparseconv as sc
from tests import oracle
from tests.fuzz.workers import answers

REFUSALS = (ValueError, TypeError, MemoryError)
LAST = 2**31
BACKENDS = ("numpy_gather_scatter", "llvm_implicit_gemm")
Row = tuple[int, ...]
#: where indices end, and beyond
FAR = (
    -LAST,
    1 - LAST,
    2 - LAST,
    LAST - 3,
    LAST - 2,
    LAST - 1,
    LAST,
    -LAST - 1,
    2**30,
    -(2**30),
    2**32,
    2**40,
    -(2**62),
)
#: sizes that nobody means
HUGE = (97, 2**16, 2**30, LAST - 1, LAST, 2**32, 2**32 + 2, 2**40, 2**62, 2**63, 10**25)


class Refused(Exception):
    """The oracle's word for a question without an answer."""


@dataclass
class Case:
    """A question; ``extreme``: one that may be refused."""

    kind: str
    rank: int
    rows: list[Row]
    batch: int
    extreme: bool
    options: dict[str, Any] = field(default_factory=dict)


def draw(seed: int, number: int) -> Case:
    """The case of a number."""
    rng = random.Random(f"{seed}/{number}")
    rank, extreme = rng.choice((1, 1, 2, 2, 3, 3, 4)), rng.random() < 0.5
    kind = rng.choice(("plan",) * 6 + ("transposed",) * 3 + ("grid",) * 3 + ("points",))
    case = Case(kind, rank, [], rng.randint(1, 3), extreme)
    if kind in ("plan", "transposed"):
        _draw_plan(rng, case)
    elif kind == "grid":
        case.rows = _rows(rng, case, [(-4, 4)] * rank)
        if rng.random() < 0.2:
            case.rows += rng.sample(case.rows, min(1, len(case.rows)))
        numbers = tuple(_size(rng, case, 0, 3) for _ in range(rank))
        numbers = tuple(n if n < 4 else max(n, 2**30) for n in numbers)  # between these lies what only takes memory
        case.options = {"operation": rng.choice(("coarsen", "refine", "dilate", "lookup", "first")), "numbers": numbers}
        case.options["queries"] = _rows(rng, case, [(-5, 5)] * rank)
    else:
        scale = 10.0 ** rng.randint(-3, 12 if extreme else 3)
        odd = (float("nan"), float("inf"), 1e300, -1e-300, 2.0**31, -(2.0**31) - 1)
        points = [[rng.gauss(0, scale) for _ in range(rank)] for _ in range(rng.randint(0, 6))]
        if extreme and points:
            rng.choice(points)[rng.randrange(rank)] = rng.choice(odd)
        sizes = (1.0, 0.1, 0.05, 3.0) + ((1e-9, 1e30, 5e-324, 0.0, -1.0, float("nan"), float("inf")) if extreme else ())
        case.options = {"points": points, "size": [rng.choice(sizes) for _ in range(rank)], "origin": rng.gauss(0, 1)}
    return case


def _draw_plan(rng: random.Random, case: Case) -> None:
    rank, options = case.rank, case.options
    most = (6, 4, 3, 2)[rank - 1]
    if rng.random() < 0.25:
        options["taps"] = sorted({tuple(_near(rng, case, 3) for _ in range(rank)) for _ in range(rng.randint(1, 6))})
        rng.shuffle(options["taps"])
    else:
        options["kernel_size"] = tuple(_size(rng, case, 1, most) for _ in range(rank))
    plain = rng.random() < 0.4
    options["stride"] = (1,) * rank if plain else tuple(_size(rng, case, 1, 3) for _ in range(rank))
    options["dilation"] = tuple(_size(rng, case, 1, 2) if rng.random() < 0.3 else 1 for _ in range(rank))
    if rng.random() < 0.4:
        options["padding"] = tuple(_near(rng, case, 3) for _ in range(rank))
    boundary, box = rng.choice(("absent", "absent", "forbid", "periodic")), None
    start = [rng.randint(-3, 3) for _ in range(rank)]
    shape = [min(max(s, 1), 2**20) * rng.randint(1, 3) for s in options["stride"]]
    if case.extreme and rng.random() < 0.2:
        axis = rng.randrange(rank)
        start[axis], shape[axis] = rng.choice(FAR), rng.choice((1, 2, *HUGE))
    if boundary != "absent" and (boundary == "periodic" or case.kind == "transposed" or rng.random() < 0.7):
        box = start, shape
    options["boundary"] = boundary, box
    fine = coarse = [(-4, 4)] * rank
    if boundary == "periodic":
        fine = [(a, a + n - 1) for a, n in zip(start, shape)]
        steps = [max(1, s) for s in options["stride"]]
        coarse = [(a // s, a // s + max(1, n // s) - 1) for a, n, s in zip(start, shape, steps)]
    source, other = (fine, coarse) if case.kind == "plan" else (coarse, fine)
    case.rows = _rows(rng, case, source)
    options["target"] = (
        rng.choice((None, None, "full", "given")) if case.kind == "plan" else rng.choice((None, "given"))
    )
    if options["target"] == "given":
        options["target"] = list(dict.fromkeys(_rows(rng, case, other)))
    options["backend"] = rng.choice(BACKENDS) if rng.random() < 0.25 else None


def _rows(rng: random.Random, case: Case, box: list[tuple[int, int]]) -> list[Row]:
    """Up to ten distinct rows: in a box; where the case is extreme, perhaps all of them far off, or one."""
    if case.extreme and rng.random() < 0.3:
        axis, far = rng.randrange(case.rank), rng.choice(FAR)
        box = [(a + far, b + far) if i == axis else (a, b) for i, (a, b) in enumerate(box)]
    rows = set()
    for _ in range(rng.choice((0, 1, 2, 4, 7, 10))):
        row = [rng.randrange(case.batch), *(rng.randint(a, b) for a, b in box)]
        if case.extreme and rng.random() < 0.03:
            row[rng.randrange(1, len(row))] = rng.choice(FAR)
        rows.add(tuple(row))
    return rng.sample(sorted(rows), len(rows))


def _size(rng: random.Random, case: Case, low: int, high: int) -> int:
    return rng.choice((*HUGE, 0, -1)) if case.extreme and rng.random() < 0.08 else rng.randint(low, high)


def _near(rng: random.Random, case: Case, reach: int) -> int:
    return rng.choice(FAR) if case.extreme and rng.random() < 0.05 else rng.randint(-reach, reach)


# ---- the package's answers, and the oracle's


def run(seed: int, number: int) -> str:
    """What became of a case, in a word and what it was."""
    case = draw(seed, number)
    try:
        want = {"plan": _plan, "transposed": _plan, "grid": _grid, "points": _points}[case.kind](case, by_package=False)
    except Refused as reason:
        want = reason
    try:
        got = {"plan": _plan, "transposed": _plan, "grid": _grid, "points": _points}[case.kind](case, by_package=True)
    except REFUSALS as error:
        if not str(error).strip():
            return f"no words: {type(error).__name__}"
        return "refused" if case.extreme or isinstance(want, Refused) else f"refused without need: {error}"
    except Exception as error:  # what must not be
        return f"{type(error).__name__}: {error}"
    if isinstance(want, Refused):
        return f"answered where {want}: {got}"
    if got != want:
        return f"different: {[name for name in want if got.get(name) != want[name]]}"
    return "the same"


def _grid_of(rows: list[Row], case: Case, **options: Any) -> sc.VoxelGrid:
    coords = torch.tensor(rows, dtype=torch.int64).reshape(-1, case.rank + 1)
    narrow = all(-LAST <= v < LAST for row in rows for v in row) and len(rows) % 2
    return sc.VoxelGrid(coords.int() if narrow else coords, case.batch, **options)


def _fit(rows: list[Row]) -> None:
    if any(not -LAST <= v < LAST - 1 for row in rows for v in row[1:]):
        raise Refused("voxels are past 32 bits")


def _plan(case: Case, by_package: bool) -> dict[str, Any]:
    return _plan_by_package(case) if by_package else _plan_by_oracle(case)


def _plan_by_package(case: Case) -> dict[str, Any]:
    given = dict(case.options)
    kind, box = given.pop("boundary")
    extent = None if box is None else sc.IndexRange(box[0], [a + n for a, n in zip(*box)])
    given["boundary"] = sc.Boundary(kind, extent)
    backend, target = given.pop("backend"), given.pop("target")
    source = _grid_of(case.rows, case)
    if isinstance(target, list):
        target = _grid_of(target, case)
    make = sc.ConvolutionPlan if case.kind == "plan" else sc.ConvolutionPlan.transposed
    plan = make(source, target=target, backend=backend or "auto", **given)
    edges = plan.kernel_map
    listed = zip(edges.pair_taps.tolist(), edges.in_rows.tolist(), edges.out_rows.tolist())
    answer: dict[str, Any] = {"target": [tuple(r) for r in plan.target.coords.tolist()], "edges": sorted(listed)}
    answer["pairs"] = edges.num_pairs
    table = edges.neighbors
    taps, outs = (table >= 0).nonzero().unbind(1)
    answer["table"] = sorted(zip(taps.tolist(), table[taps, outs].tolist(), outs.tolist()))
    if edges.mirror is not None:
        turned = sorted((edges.mirror[tap], o, i) for tap, i, o in answer["edges"])
        answer["mirror"] = turned == answer["edges"] and sorted(edges.mirror) == list(range(edges.num_taps))
    if edges.identity_tap is not None:
        answer["identity"] = [(i, o) for tap, i, o in answer["edges"] if tap == edges.identity_tap]
    if backend is not None and len(answer["edges"]) < 2000:
        x, weight, grad = _operands(edges.num_in, edges.num_taps, edges.num_out)
        y = plan.execute(x.requires_grad_(), weight.requires_grad_())
        answer["values"] = [t.tolist() for t in (y.detach(), *torch.autograd.grad(y, (x, weight), grad))]
    return answer


def _operands(num_in: int, taps: int, num_out: int) -> tuple[torch.Tensor, ...]:
    """Small integers, whose sums are exact."""
    sizes = (num_in, 2), (taps, 2, 3), (num_out, 3)
    return tuple((torch.arange(math.prod(s), dtype=torch.float64) * 7 % 5 - 2).reshape(s) for s in sizes)


def _plan_by_oracle(case: Case) -> dict[str, Any]:
    o, rank = case.options, case.rank
    _fit(case.rows)
    if isinstance(o["target"], list):
        _fit(o["target"])
    if min(*o["stride"], *o["dilation"], *o.get("kernel_size", (1,))) < 1:
        raise Refused("sizes are not positive")
    if math.prod(o.get("kernel_size", (1,))) > 2**15:
        raise Refused("there are too many taps")
    numbers = (*o["stride"], *o["dilation"], *o.get("padding", ()))
    if any(abs(v) >= LAST for v in numbers):
        raise Refused("sizes are past 32 bits")
    if "taps" in o:
        points = [tuple(d * t for d, t in zip(o["dilation"], tap)) for tap in o["taps"]]
        pad = o.get("padding", (0,) * rank)
    else:
        points = oracle.window_taps(o["kernel_size"], o["dilation"])
        pad = o.get("padding") or oracle.default_padding(o["kernel_size"], o["dilation"])
    offsets = [tuple(p - q for p, q in zip(point, pad)) for point in points]
    stride, (kind, box) = o["stride"], o["boundary"]
    if any(abs(v) >= LAST for offset in offsets for v in offset):
        raise Refused("offsets are past 32 bits")
    if box is not None and any(not -LAST <= a <= a + n < LAST for a, n in zip(*box)):
        raise Refused("the box is past 32 bits")
    torus = box if kind == "periodic" else None
    coarse_torus = None
    if torus is not None:
        if any(n % s for n, s in zip(torus[1], stride)):
            raise Refused("the torus is no multiple of the stride")
        coarse_torus = [a // s for a, s in zip(torus[0], stride)], [n // s for n, s in zip(torus[1], stride)]
    source, target = case.rows, o["target"]
    own = case.kind == "plan" and target is None and all(s == 1 for s in stride)
    if case.kind == "plan":
        _within(source, torus)
        low, shape = box or _bounds(source, rank)
        reach = [(min(column), max(column)) for column in zip(*offsets)]

        def whole(row: Row) -> bool:
            return kind != "forbid" or all(
                a <= s * v + first and s * v + last < a + n
                for v, s, (first, last), a, n in zip(row[1:], stride, reach, low, shape)
            )

        if isinstance(target, list):
            if not all(map(whole, target)):
                raise Refused("windows of the target leave the extent")
            outs = target
        elif own:
            outs = [row for row in source if whole(row)]
        else:
            seen = {
                _fold((b, *((v - q) // s for v, q, s in zip(row, offset, stride))), coarse_torus)
                for b, *row in source
                for offset in offsets
                if all((v - q) % s == 0 for v, q, s in zip(row, offset, stride))
            }
            _fit(list(seen))
            outs = [row for row in sorted(seen) if whole(row)]
        fine, coarse = source, outs
    else:
        _within(source, coarse_torus)

        def inside(row: Row) -> bool:
            return kind != "forbid" or all(a <= v < a + n for v, a, n in zip(row[1:], *box))

        if isinstance(target, list):
            if not all(map(inside, target)):
                raise Refused("the target leaves the extent")
            outs = target
        else:
            reached = {
                _fold((b, *(s * v + q for v, q, s in zip(row, offset, stride))), torus)
                for b, *row in source
                for offset in offsets
            }
            outs = sorted(filter(inside, reached))
        _fit(outs)
        fine, coarse = outs, source
    _within(fine, torus)
    _within(coarse, coarse_torus)
    edges = oracle.edges(fine, coarse, offsets, stride, (0,) * rank, torus)
    if case.kind == "transposed":
        edges = [(tap, j, i) for tap, i, j in edges]
    edges = sorted(edges)
    answer: dict[str, Any] = {"target": outs, "edges": edges, "pairs": len(edges), "table": edges}
    same = own and outs == source
    if same:
        counts = Counter(_fold((0, *offset), (torus and ([0] * rank, torus[1]))) for offset in offsets)
        negative = Counter(_fold((0, *(-v for v in offset)), (torus and ([0] * rank, torus[1]))) for offset in offsets)
        if counts == negative:
            answer["mirror"] = True
        if (0,) * (rank + 1) in counts:
            answer["identity"] = [(i, i) for i in range(len(source))]
    if o["backend"] is not None and len(edges) < 2000:
        x, weight, grad = (t.numpy() for t in _operands(len(source), len(offsets), len(outs)))
        values = oracle.convolve(x, weight, edges, len(outs))
        grads = oracle.input_grad(grad, weight, edges, len(source)), oracle.weight_grad(x, grad, edges, len(offsets))
        answer["values"] = [t.tolist() for t in (values, *grads)]
    return answer


def _fold(row: Row, torus: tuple | None) -> Row:
    if torus is None:
        return row
    return (row[0], *((v - a) % n + a for v, a, n in zip(row[1:], *torus)))


def _within(rows: list[Row], torus: tuple | None) -> None:
    if torus is not None and any(not a <= v < a + n for row in rows for v, a, n in zip(row[1:], *torus)):
        raise Refused("voxels leave the torus")


def _bounds(rows: list[Row], rank: int) -> tuple[list[int], list[int]]:
    columns = list(zip(*rows))[1:] or [(0,)] * rank
    low = [min(column) for column in columns]
    return low, [max(column) - a + 1 if rows else 0 for column, a in zip(columns, low)]


def _grid(case: Case, by_package: bool) -> dict[str, Any]:
    operation, numbers, queries = (case.options[name] for name in ("operation", "numbers", "queries"))
    rows: list[Row]
    if by_package:
        grid = _grid_of(case.rows, case, duplicates="first" if operation == "first" else "error")
        if operation == "lookup":
            return {"found": grid.lookup(torch.tensor(queries, dtype=torch.int64).reshape(-1, case.rank + 1)).tolist()}
        made = grid if operation == "first" else getattr(grid, operation)(numbers)
        rows = [tuple(row) for row in made.coords.tolist()]
        return {"rows": sorted(rows) if operation == "refine" else rows}
    _fit(case.rows)
    kept = list(dict.fromkeys(case.rows))
    if operation == "first":
        return {"rows": kept}
    if len(kept) < len(case.rows):
        raise Refused("a voxel occurs twice")
    if operation == "lookup":
        return {"found": [kept.index(q) if q in kept else -1 for q in queries]}
    if min(numbers) < (0 if operation == "dilate" else 1):
        raise Refused("sizes are too small")
    if operation == "coarsen":
        found = {(b, *(v // f for v, f in zip(row, numbers))) for b, *row in kept}
        return {"rows": sorted(found)}
    if math.prod(2 * n + 1 for n in numbers) * max(1, len(kept)) > 10**6:
        raise Refused("there are too many voxels")
    moves = [range(n) if operation == "refine" else range(-n, n + 1) for n in numbers]
    factors = numbers if operation == "refine" else (1,) * case.rank
    found = {
        (b, *(f * v + m for v, f, m in zip(row, factors, move)))
        for b, *row in kept
        for move in itertools.product(*moves)
    }
    _fit(list(found))
    return {"rows": sorted(found)}


def _points(case: Case, by_package: bool) -> dict[str, Any]:
    points, size, origin = (case.options[name] for name in ("points", "size", "origin"))
    if by_package:
        cloud = torch.tensor(points, dtype=torch.float64).reshape(-1, case.rank)
        grid, rows = sc.voxelize(cloud, size, origin=origin)
        return {"voxels": [tuple(row) for row in grid.coords.tolist()], "rows": rows.tolist()}
    if any(not (math.isfinite(s) and s > 0) for s in size):
        raise Refused("a voxel has no size")
    cells = [[(p - origin) / s for p, s in zip(point, size)] for point in points]
    if any(not math.isfinite(v) for cell in cells for v in cell):
        raise Refused("points are not finite")
    found = [(0, *map(math.floor, cell)) for cell in cells]
    _fit(found)
    voxels = sorted(set(found))
    return {"voxels": voxels, "rows": [voxels.index(cell) for cell in found]}


def main(count: int, seed: int) -> list[str]:
    """Draw and run the cases, print how they ended, and name those that are wrong."""
    ended = answers(run, count, seed)
    kinds = Counter(
        "silent difference" if word.startswith(("different", "answered")) else word.split(":")[0] for word in ended
    )
    for kind in ("the same", "refused", "silent difference", "crash", "hang"):
        print(f"{kinds.pop(kind, 0):8,} {kind}")
    for kind, times in kinds.items():
        print(f"{times:8,} {kind}")
    wrong = [(number, word) for number, word in enumerate(ended) if word not in ("the same", "refused")]
    return [f"{number}: {word[:400]}\n    {draw(seed, number)}" for number, word in wrong]
