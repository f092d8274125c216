"""Term lists and inputs that the tests of the products share, and other ways of writing the same info."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparseconv.products import SparseProductInfo, sparse_product_infos
from tests.products.oracle import RANKS

PRODUCT_NAMES = list(RANKS)

#: relative to the root mean square of the reference: fp64 to its rounding; fp32 the roundings of a plain sum of 10^4;
#: fp16 and bf16 one rounding of the result (sums are kept in fp32), inputs being exact
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """T terms over M1 x M2 rows onto M rows."""

    name: str
    triples: list[tuple[int, int, int, float]]
    out_size: int
    in1_size: int
    in2_size: int

    def columns(self):
        """index1, index2, index_out, scale as lists."""
        return [list(column) for column in zip(*self.triples)] if self.triples else [[], [], [], []]

    def infos(self, dtype=torch.float64):
        index1, index2, index_out, scale = self.columns()
        sizes = (self.out_size, self.in1_size, self.in2_size)
        return sparse_product_infos(index1, index2, index_out, torch.tensor(scale, dtype=dtype), *sizes)


def random_case(name, terms, out_size, in1_size, in2_size, seed=0):
    """Unsorted terms with repeats; scales are small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(size, (terms,), generator=generator).tolist() for size in (in1_size, in2_size, out_size)]
    scale = (torch.randint(1, 3, (terms,), generator=generator) * 2.0 - 3.0).tolist()
    return Case(name, list(zip(*draw, scale)), out_size, in1_size, in2_size)


CASES = [
    random_case("random", 23, 5, 4, 3),
    Case("first row empty", [(0, 1, 2, 1.0), (2, 0, 1, -2.0), (1, 1, 2, 1.0)], 3, 3, 2),
    Case("middle row empty", [(0, 1, 2, 1.0), (2, 0, 0, -2.0)], 3, 3, 2),
    Case("last rows empty", [(0, 1, 0, 1.0), (2, 0, 1, -2.0)], 4, 4, 3),
    Case("no terms", [], 3, 2, 2),
    Case("no output rows", [], 0, 2, 2),
    Case("no input rows", [], 2, 0, 0),
    Case("one term", [(0, 0, 0, 3.0)], 1, 1, 1),
    Case("repeated terms", [(1, 1, 0, 1.0)] * 4 + [(0, 1, 0, 2.0)], 1, 2, 2),
    random_case("one long segment", 700, 2, 5, 300),
    random_case("many rows", 150, 80, 60, 70),
]

#: dense sizes a, b, c: odd, and not the multiple of anything
AXES = {"a": 3, "b": 5, "c": 7}
_AXES1 = {"mul": "c", "outer": "a", "inner": "c", "vecmat": "a", "vecsca": "c", "scavec": "", "mat_t_vec": "ab"}
_AXES2 = {"mul": "c", "outer": "b", "inner": "c", "vecmat": "ab", "vecsca": "", "scavec": "c", "mat_t_vec": "a"}


def inputs(product, case, shared1, shared2, batch=3, axes=None, dtype=torch.float64, integers=False, seed=1):
    """Two inputs of a product, random or of small integers."""
    axes = AXES if axes is None else axes
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shared, rows, letters in (
        (shared1, case.in1_size, _AXES1[product]),
        (shared2, case.in2_size, _AXES2[product]),
    ):
        shape = ([] if shared else [batch]) + [rows] + [axes[letter] for letter in letters]
        if integers:
            tensors.append(torch.randint(-2, 3, shape, generator=generator).to(dtype))
        else:
            tensors.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return tensors


def gathered(info: SparseProductInfo, seed=0) -> SparseProductInfo:
    """The same info with its terms in another order, which gather_index mends."""
    columns = (info.scale, info.index1, info.index2)
    terms = next(column.shape[0] for column in columns if column is not None)
    order = torch.randperm(terms, generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(terms)
    scale, index1, index2 = (None if column is None else column[order] for column in columns)
    return replace(info, scale=scale, index1=index1, index2=index2, gather_index=place)


def listed(info: SparseProductInfo) -> SparseProductInfo:
    """The same info without its empty segments; index_out names the rows of the others."""
    rows = (info.seg_out[1:] > info.seg_out[:-1]).nonzero()[:, 0]
    seg_out = torch.cat([info.seg_out[:1], info.seg_out[1:][rows]])
    return replace(info, seg_out=seg_out, index_out=rows)


def relative_error(out, reference):
    """The greatest error of an element, over its size or the root mean square of all, whichever is larger."""
    if reference.numel() == 0:
        return 0.0
    out, reference = out.detach(), reference.detach()
    rms = reference.double().square().mean().sqrt().clamp_min(1e-30)
    return float(((out.double() - reference.double()).abs() / reference.double().abs().clamp_min(rms)).max())
