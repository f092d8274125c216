"""Where other libraries keep a convolution's weights: one table of layouts, one function that permutes between them.

Every library here computes the same cross-correlation, so a layout is an order of axes and of taps, nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from sparseconv.checks import check_kind
from sparseconv.geometry.ranges import Ints, per_axis

if TYPE_CHECKING:
    from jaxtyping import Shaped


@dataclass(frozen=True)
class Layout:
    """How one library stores the weight of a convolution over coordinate axes a0, a1, ... (batch left out).

    ``axes`` names the parameter's dimensions: ``k`` for all kernel axes k0, k1, ... in turn, ``v`` for the taps in one
    dimension, ``i`` for C_in/G, ``o`` for C_out.

    >>> LAYOUTS["spconv"].axes, LAYOUTS["minkowski"].parameter
    ('oki', 'kernel')
    """

    name: str
    axes: str
    parameter: str = "weight"
    #: of ``v``: the axis whose taps are neighbors; "odd_first" is first for an odd number of taps and last for an even
    fastest: Literal["last", "first", "odd_first"] = "last"
    #: the dimensions where there is one tap; None for no exception, "memory" for (C_in, C_out) under the usual shape
    one_tap: str | None = None
    #: dimensions of a grouped weight, with ``g`` for the groups; None where the usual ones serve, "" for no groups
    grouped: str | None = ""
    bias_row: bool = False  # the bias is (1, C_out)
    #: names of modules that the library puts between a layer and torch's own (norms, linear layers)
    norm_inside: str | None = None
    linear_inside: str | None = None
    even_padding: str = ""  # what even kernel axes mean there, where it differs from ours


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("sparseconv", "vio", grouped=None),
        Layout("spconv", "oki", one_tap="memory"),
        Layout("spconv-rskc", "koi"),
        Layout("spconv-rsck", "kio"),
        Layout(
            "minkowski",
            "vio",
            "kernel",
            "first",
            one_tap="io",
            bias_row=True,
            norm_inside="bn",
            linear_inside="linear",
            even_padding="even kernel axes cover 0 .. k-1: give the layers padding 0 there",
        ),
        Layout("torchsparse", "vio", "kernel", "odd_first", one_tap="io"),
        Layout("fvdb", "oik", one_tap="oi"),
        Layout(
            "warpconvnet",
            "vio",
            grouped="vgio",
            norm_inside="norm",
            even_padding="even kernel axes cover 0 .. k-1: give the layers padding 0 there",
        ),
        Layout("flexgemm", "oki"),
        Layout("torch", "oik", grouped=None),
    )
}
"""How each library stores weights, by name: ``sparseconv``, ``spconv``, ``minkowski`` and others."""

ALIASES = {
    "trellis": "flexgemm",
    "spconv-krsc": "spconv",
    "spconv1": "spconv-rsck",
    "me": "minkowski",
    "ours": "sparseconv",
    "wcn": "warpconvnet",
}
#: orders of dimensions that only sizes can tell apart, and where their kernel begins
ORDERS = {"oki": 1, "kio": 0, "koi": 0}
#: no kernel in use has more taps along an axis
LONGEST_EDGE = 15


def layout_of(name: str | Layout) -> Layout:
    """The layout of a library by name. Raises ValueError that lists them all."""
    if isinstance(name, Layout):
        return name
    check_kind("layout", name, str, f"pass one of {', '.join(LAYOUTS)}")
    key = ALIASES.get(name.lower(), name.lower())
    if key not in LAYOUTS:
        raise ValueError(f"no layout {name!r}; there are {', '.join(LAYOUTS)} (and {', '.join(ALIASES)})")
    return LAYOUTS[key]


def permute(
    weight: Shaped[torch.Tensor, " ..."],
    from_: str | Layout,
    to: str | Layout,
    *,
    kernel_size: int | Sequence[int] | None = None,
    rank: int = 3,
    groups: int = 1,
) -> Shaped[torch.Tensor, " ..."]:
    """A weight in one library's layout -> in another's, contiguous.

    Args:
        weight: as the library ``from_`` stores it.
        kernel_size: taps along each axis; needed where the layout has the taps in one dimension and they are no cube.
        rank: number of spatial axes.
        groups: channel groups.

    Raises:
        ValueError: a shape that the layout cannot have, with the shape that it should.

    >>> kernel = torch.arange(6.0).view(6, 1, 1)      # MinkowskiEngine, kernel (3, 2): the first axis is fastest
    >>> permute(kernel, "minkowski", "sparseconv", kernel_size=(3, 2), rank=2).flatten().tolist()
    [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    """
    source, target = layout_of(from_), layout_of(to)
    sizes = kernel_of(weight, source, kernel_size, rank, groups)
    return _store(_canonical(weight, source, sizes, groups), target, sizes, groups)


def kernel_of(
    weight: torch.Tensor, layout: Layout, kernel_size: int | Sequence[int] | None, rank: int, groups: int = 1
) -> Ints:
    """Taps along each axis of a stored weight, checked against what is given."""
    given = None if kernel_size is None else per_axis(kernel_size, rank, "kernel_size", 1)
    axes = _axes(layout, weight.ndim, groups, rank)
    if "k" in axes:
        at = axes.index("k")
        sizes = tuple(weight.shape[at : at + rank])
    else:
        taps = weight.shape[axes.index("v")] if "v" in axes else 1
        edge = round(taps ** (1 / rank))
        sizes = given if given is not None and math.prod(given) == taps else (edge,) * rank
        if math.prod(sizes) != taps:
            raise ValueError(
                f"{taps} taps in {tuple(weight.shape)} are no cube of rank {rank}: give kernel_size="
                if given is None
                else f"kernel_size {given} has {math.prod(given)} taps, the weight {tuple(weight.shape)} has {taps}"
            )
    if given is not None and sizes != given:
        raise ValueError(f"kernel_size {given} was asked for, the weight {tuple(weight.shape)} has {sizes}")
    return sizes


def _axes(layout: Layout, ndim: int, groups: int, rank: int) -> str:
    """The dimensions of a weight with ``ndim`` of them."""
    forms = [layout.axes]
    if groups > 1:
        if layout.grouped == "":
            raise ValueError(f"{layout.name} has no grouped convolution; groups={groups} was given")
        forms = [layout.grouped or layout.axes]
    elif layout.one_tap not in (None, "memory"):
        forms.append(str(layout.one_tap))
    for axes in forms:
        if len(axes) + (rank - 1 if "k" in axes else 0) == ndim:
            return axes
    words = {"k": ", ".join(f"k{a}" for a in range(rank)), "v": "taps", "i": "C_in", "o": "C_out", "g": "groups"}
    wanted = " or ".join("(" + ", ".join(words[a] for a in axes) + ")" for axes in forms)
    raise ValueError(f"a weight of {layout.name} is {wanted}; got {ndim} dimensions")


def _canonical(weight: torch.Tensor, layout: Layout, sizes: Ints, groups: int) -> torch.Tensor:
    """A stored weight -> (k0, ..., C_in/G, C_out)."""
    rank, axes = len(sizes), _axes(layout, weight.ndim, groups, len(sizes))
    if layout.one_tap == "memory" and math.prod(sizes) == 1:
        c_out, c_in = weight.shape[0], weight.shape[-1]
        return weight.reshape(c_in, c_out).reshape(*sizes, c_in, c_out)
    if "k" in axes:
        at = axes.index("k")
        names = [*axes[:at], *range(rank), *axes[at + 1 :]]
        return weight.permute([names.index(n) for n in (*range(rank), "i", "o")])
    if "g" in axes:
        taps, g, c_in, c_out = weight.shape
        weight = weight.permute(0, 2, 1, 3).reshape(taps, c_in, g * c_out)
        axes = "vio"
    if "v" not in axes:
        weight, axes = weight[None], "v" + axes
    weight = weight.permute([axes.index(a) for a in "vio"])
    if not _first_fastest(layout, sizes):
        return weight.reshape(*sizes, *weight.shape[1:])
    return weight.reshape(*reversed(sizes), *weight.shape[1:]).permute([*reversed(range(rank)), rank, rank + 1])


def _store(weight: torch.Tensor, layout: Layout, sizes: Ints, groups: int) -> torch.Tensor:
    """(k0, ..., C_in/G, C_out) -> as the library stores it."""
    rank, (c_in, c_out) = len(sizes), weight.shape[-2:]
    one = math.prod(sizes) == 1 and groups == 1
    axes = layout.axes if groups == 1 else layout.grouped or layout.axes
    if groups > 1 and layout.grouped == "":
        raise ValueError(f"{layout.name} has no grouped convolution; this weight has {groups} groups")
    if one and layout.one_tap == "memory":
        return weight.reshape(c_in, c_out).reshape(c_out, *sizes, c_in).contiguous()
    if one and layout.one_tap is not None:
        flat = weight.reshape(c_in, c_out)
        return (flat if layout.one_tap == "io" else flat.T).contiguous()
    if "k" in axes:
        at = axes.index("k")
        names = [*axes[:at], *range(rank), *axes[at + 1 :]]
        here = [*range(rank), "i", "o"]
        return weight.permute([here.index(n) for n in names]).contiguous()
    if _first_fastest(layout, sizes):
        weight = weight.permute([*reversed(range(rank)), rank, rank + 1])
    weight = weight.reshape(-1, c_in, c_out)
    if "g" in axes:
        weight = weight.reshape(-1, c_in, groups, c_out // groups).permute(0, 2, 1, 3)
    return weight.contiguous()


def _first_fastest(layout: Layout, sizes: Ints) -> bool:
    return layout.fastest == "first" or (layout.fastest == "odd_first" and math.prod(sizes) % 2 == 1)


def check_order(weights: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> None:
    """Raise ValueError where weights that have an axis a kernel axis are of another order than this layout's.

    spconv wrote (*kernel, C_in, C_out) before 2.2 and (C_out, *kernel, C_in) since; both have the same number of
    dimensions. A weight tells its order where one kernel would be a cube and the other none, or have an edge past any
    kernel's. Where none tells, the shorter edges count: kernels are shorter than channels are many.
    """
    if layout.axes not in ORDERS:
        return
    other = "kio" if layout.axes == "oki" else "oki"
    told = {key: _order(weight.shape, rank) for key, weight in weights.items()}
    wrong = [key for key, order in told.items() if order == other]
    if not wrong and layout.axes not in told.values():
        edges = {key: [max(w.shape[ORDERS[o] :][:rank]) for o in (layout.axes, other)] for key, w in weights.items()}
        wrong = [key for key, (mine, theirs) in edges.items() if theirs < mine]
    if not wrong:
        return
    shape = tuple(weights[wrong[0]].shape)
    say = (
        "spconv 1.x and 2.0 wrote (*kernel, C_in, C_out): use spconv-rsck, or spconv-rskc for files that were saved as "
        "(*kernel, C_out, C_in)"
        if other == "kio"
        else "spconv 2.2 and later write (C_out, *kernel, C_in): use spconv"
    )
    raise ValueError(
        f"{wrong[0]} {shape} is no weight of {layout.name}, whose kernel would be "
        f"{shape[ORDERS[layout.axes] :][:rank]}. {say}. Where it is right, name the kernel's size in kernel_sizes "
        "(--kernel)"
    )


def _order(shape: Sequence[int], rank: int) -> str | None:
    """The order of dimensions that a weight's shape tells, "oki" or "kio", or None."""
    is_sound = []
    for order in ("oki", "kio"):
        kernel = shape[ORDERS[order] :][:rank]
        is_sound.append((max(kernel) <= LONGEST_EDGE, len(set(kernel)) == 1))
    if is_sound[0] == is_sound[1] or not any(fits for fits, _ in is_sound):
        return None
    return "oki" if is_sound[0] > is_sound[1] else "kio"


def saved_to_krsc(weight: torch.Tensor, saved: str) -> torch.Tensor:
    """A weight that spconv saved as KRSC, RSKC or RSCK -> (C_out, *kernel, C_in)."""
    rank = weight.ndim - 2
    if saved == "KRSC":
        return weight
    to = LAYOUTS["flexgemm"]  # the axes of KRSC without an exception for one tap
    return permute(weight, f"spconv-{saved.lower()}", to, rank=rank)


def hyper_cross_taps(rank: int, radius: int | Sequence[int] = 1) -> list[Ints]:
    """The taps of MinkowskiEngine's hyper-cross in its order, for ``taps=`` of a plan or layer.

    The center, then for each axis +1 .. +radius, -radius .. -1; ``radius`` is one integer, or one per axis.

    >>> hyper_cross_taps(2)
    [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    """
    taps = [(0,) * rank]
    for axis, edge in enumerate(per_axis(radius, rank, "radius")):
        for step in (*range(1, edge + 1), *range(-edge, 0)):
            taps.append(tuple(step if a == axis else 0 for a in range(rank)))
    return taps
