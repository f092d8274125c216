"""Checkpoints of other libraries, to and from: strict about keys and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.checks import check_kind
from sparseconv.files import check_place
from sparseconv.interop.files import State, check_entries, read, some, write
from sparseconv.interop.layouts import LAYOUTS, Layout, check_order, kernel_of, layout_of, permute

if TYPE_CHECKING:
    from jaxtyping import Shaped


@dataclass(frozen=True)
class Entry:
    """What became of one tensor."""

    key_in: str
    key_out: str
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    #: "convolution" where axes were permuted, "kept" otherwise
    what: str


@dataclass(frozen=True)
class Report:
    """What a conversion did, tensor by tensor.

    >>> _, report = convert_state({"conv.weight": torch.zeros(8, 3, 3, 3, 4)}, "spconv", "sparseconv")
    >>> report.entries[0].shape_in, report.entries[0].shape_out
    ((8, 3, 3, 3, 4), (27, 4, 8))
    """

    source: str
    target: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def convolutions(self) -> int:
        return sum(entry.what == "convolution" for entry in self.entries)

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(entry.shape_out) for entry in self.entries)

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.target}: {len(self.entries)} tensors, {self.convolutions} convolutions permuted, "
            f"{self.parameters:,} numbers"
        )


# ---- conversion


def convert(
    path_in: str | Path,
    path_out: str | Path,
    from_: str | Layout,
    to: str | Layout,
    *,
    ignore_classes: Sequence[str] = (),
    rank: int = 3,
    kernel_sizes: Mapping[str, int | Sequence[int]] | None = None,
    groups: Mapping[str, int] | None = None,
    skip: Sequence[str] = (),
    strided_one_tap: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> Report:
    """Convert one file into another; options are those of `read` and `convert_state`. No file is left after an error.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write({"conv.kernel": torch.zeros(27, 4, 8)}, f"{folder}/theirs.pt")
    ...     print(convert(f"{folder}/theirs.pt", f"{folder}/ours.pt", "minkowski", "sparseconv"))
    minkowski -> sparseconv: 1 tensors, 1 convolutions permuted, 864 numbers
    """
    options: Any = {"rank": rank, "kernel_sizes": kernel_sizes, "groups": groups, "skip": skip}
    options |= {"strided_one_tap": strided_one_tap, "rename": rename}
    check_place(path_out)
    state, report = convert_state(read(path_in, ignore_classes=ignore_classes), from_, to, **options)
    write(state, path_out)
    return report


def convert_state(
    state: Mapping[str, Shaped[torch.Tensor, " ..."]],
    from_: str | Layout,
    to: str | Layout,
    *,
    rank: int = 3,
    kernel_sizes: Mapping[str, int | Sequence[int]] | None = None,
    groups: Mapping[str, int] | None = None,
    skip: Sequence[str] = (),
    strided_one_tap: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> tuple[State, Report]:
    """Parameters of one library -> those of another.

    Args:
        state: tensors by key.
        from_, to: names in `LAYOUTS`.
        rank: number of spatial axes; it tells sparse convolutions from dense layers of another rank.
        kernel_sizes: taps along each axis by key, or by a pattern such as ``"*.conv_input.*"``; needed where taps in
            one dimension are no cube, and to name weights of one tap that look like linear layers.
        groups: channel groups by key or pattern.
        skip: keys or patterns of dense layers that look like sparse convolutions, such as a dense Conv3d.
        strided_one_tap: keys or patterns of spconv's layers of one tap whose stride is not 1: those keep
            (C_out, 1, 1, 1, C_in) as it reads, while at stride 1 that memory is (C_in, C_out).
        rename: from the keys of this network to those of another, applied last.

    Returns:
        (tensors by key, none of which shares memory with the given ones; `Report`).

    Raises:
        ValueError: no convolution of that layout, weights that belong to another library, shapes the layout cannot
            have, patterns that match nothing, or two keys that become one; keys and shapes are named.

    >>> state, report = convert_state({"conv.weight": torch.zeros(8, 3, 3, 3, 4)}, "spconv", "sparseconv")
    >>> {key: tuple(tensor.shape) for key, tensor in state.items()}, report.convolutions
    ({'conv.weight': (27, 4, 8)}, 1)
    """
    check_kind("state", state, Mapping, "pass a dict of tensors by key, such as module.state_dict()")
    check_entries(state)
    source, target = layout_of(from_), layout_of(to)
    sizes, grouped = dict(kernel_sizes or {}), dict(groups or {})
    _check_patterns(state, [*sizes, *grouped, *skip, *strided_one_tap])
    norms = {key[: -len(".running_mean")] for key in state if key.endswith(".running_mean")}
    convolutions = _convolutions(state, source, rank, sizes, grouped, skip)
    layers = {key.rpartition(".")[0] for key in convolutions}
    result: State = {}
    entries = []
    even = False
    for key, tensor in state.items():
        parent, _, leaf = key.rpartition(".")
        new, what, out = leaf, "kept", tensor
        if key in convolutions:
            size, count = _matching(sizes, key), _matching(grouped, key) or 1
            ends = [_plain(end) if _matches(strided_one_tap, key) else end for end in (source, target)]
            out = permute(tensor, *ends, kernel_size=size, rank=rank, groups=count)
            even |= any(n % 2 == 0 for n in kernel_of(tensor, source, size, rank, count))
            new, what = target.parameter, "convolution"
        elif leaf == "bias" and parent in layers and tensor.ndim <= 2:
            out = tensor.reshape(1, -1) if target.bias_row else tensor.reshape(-1)
        parent = _rehoused(parent, leaf, tensor, source, target, norms, layers)
        name = ".".join(p for p in (parent, new) if p)
        name = name if rename is None else rename(name)
        if name in result:
            raise ValueError(f"two tensors become {name!r}; the second is {key!r} {tuple(tensor.shape)}")
        result[name] = (
            out.contiguous()
            if out.data_ptr() != tensor.data_ptr()
            else out.clone(memory_format=torch.contiguous_format)
        )
        entries.append(Entry(key, name, tuple(tensor.shape), tuple(out.shape), what))
    notes = [f"in {end.name}, {end.even_padding}" for end in (source, target) if even and end.even_padding]
    if source.one_tap == "oi" and any(e.what == "kept" and len(e.shape_in) == 2 for e in entries):
        notes.append("weights of two dimensions were kept as linear layers: name those of one tap in kernel_sizes")
    return result, Report(source.name, target.name, tuple(entries), tuple(notes))


def _plain(layout: Layout) -> Layout:
    return replace(layout, one_tap=None) if layout.one_tap == "memory" else layout


def _convolutions(
    state: Mapping[str, torch.Tensor],
    layout: Layout,
    rank: int,
    sizes: Mapping[str, Any],
    groups: Mapping[str, int],
    skip: Sequence[str],
) -> set[str]:
    """The keys of weights of convolutions; an error where there is none or some belong to another library."""
    found, foreign, told_by_shape = set(), [], {}
    for key, tensor in state.items():
        if _matches(skip, key):
            continue
        leaf = key.rpartition(".")[2]
        named = _matching(sizes, key) is not None or _matching(groups, key) is not None
        if leaf == layout.parameter and (named or _looks_like(tensor, layout, rank)):
            try:
                kernel_of(tensor, layout, _matching(sizes, key), rank, _matching(groups, key) or 1)
            except ValueError as error:
                raise ValueError(f"{key} {tuple(tensor.shape)}: {error}") from None
            found.add(key)
            if _matching(sizes, key) is None:
                told_by_shape[key] = tensor
        elif leaf in ("weight", "kernel") and tensor.ndim >= 3 and _suspicious(tensor, layout, leaf):
            foreign.append(f"{key} {tuple(tensor.shape)}")
    if foreign and (layout.parameter == "kernel" or layout.grouped or not found):
        raise ValueError(
            f"these are no weights of {layout.name} in rank {rank}: {some(foreign)}. {_guess(state, rank)} Dense "
            "layers are named in skip, grouped ones in groups"
        )
    if not found:
        shapes = [f"{key} {tuple(t.shape)}" for key, t in state.items() if t.ndim > 1]
        raise ValueError(
            f"no convolution of {layout.name} in rank {rank} among {len(state)} tensors ({some(shapes)}). "
            f"{_guess(state, rank)}"
        )
    check_order(told_by_shape, layout, rank)
    return found


def _looks_like(tensor: torch.Tensor, layout: Layout, rank: int) -> bool:
    """Whether the dimensions of a weight alone make it a convolution of this layout."""
    usual = len(layout.axes) + (rank - 1 if "k" in layout.axes else 0)
    one_tap = layout.parameter == "kernel" and layout.one_tap is not None and tensor.ndim == 2
    return tensor.ndim == usual or one_tap


def _suspicious(tensor: torch.Tensor, layout: Layout, leaf: str) -> bool:
    """Whether a weight that is no convolution of the layout should be explained; a Conv2d's passes where it can."""
    return leaf != layout.parameter or tensor.ndim != 4 or bool(layout.grouped)


def _guess(state: Mapping[str, torch.Tensor], rank: int) -> str:
    """Which libraries the dimensions and names point to, as a sentence."""
    fits = [
        layout.name
        for layout in LAYOUTS.values()
        if any(
            key.rpartition(".")[2] == layout.parameter and tensor.ndim >= 3 and _looks_like(tensor, layout, rank)
            for key, tensor in state.items()
        )
    ]
    return f"By names and dimensions it could be {', '.join(fits)}." if fits else "It fits no library in the table."


def _rehoused(
    parent: str, leaf: str, tensor: torch.Tensor, source: Layout, target: Layout, norms: set[str], layers: set[str]
) -> str:
    """The path of a layer without the source's inner modules, and with the target's."""
    inner = {
        "norm": (source.norm_inside, target.norm_inside, parent in norms),
        "linear": (
            source.linear_inside,
            target.linear_inside,
            parent not in norms and parent not in layers and leaf in ("weight", "bias") and tensor.ndim <= 2,
        ),
    }
    for have, want, applies in inner.values():
        if not applies or have == want:
            continue
        outer, _, last = parent.rpartition(".")
        if have is not None and last == have and outer:
            return outer if want is None else f"{outer}.{want}"
        if have is None and want is not None and (leaf != "bias" or parent in norms):
            return f"{parent}.{want}"
    return parent


def _matches(patterns: Sequence[str], key: str) -> bool:
    return any(key == pattern or fnmatchcase(key, pattern) for pattern in patterns)


def _matching(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return values[key]
    return next((value for pattern, value in values.items() if fnmatchcase(key, pattern)), None)


def _check_patterns(state: Mapping[str, torch.Tensor], patterns: Sequence[str]) -> None:
    idle = [p for p in patterns if not any(key == p or fnmatchcase(key, p) for key in state)]
    if idle:
        raise ValueError(f"no key matches {some(idle)}; the keys are {some(list(state))}")


# ---- into a network


def load(
    module: torch.nn.Module,
    checkpoint: str | Path | Mapping[str, Shaped[torch.Tensor, " ..."]],
    from_: str | Layout,
    *,
    ignore_classes: Sequence[str] = (),
    rank: int = 3,
    kernel_sizes: Mapping[str, int | Sequence[int]] | None = None,
    groups: Mapping[str, int] | None = None,
    skip: Sequence[str] = (),
    strided_one_tap: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> Report:
    """Load another library's checkpoint into a network of this one, whole or not at all.

    Options are those of `read` and `convert_state`.

    Raises:
        ValueError: keys that are missing or unknown, shapes that differ, or dtypes that are none of floating point
            where weights are; all of them are named, nothing is loaded.

    >>> from sparseconv.nn import SubmanifoldConv
    >>> theirs = {"weight": torch.ones(8, 3, 3, 3, 4), "bias": torch.zeros(8)}
    >>> print(load(SubmanifoldConv(4, 8, 3), theirs, "spconv"))
    spconv -> sparseconv: 2 tensors, 1 convolutions permuted, 872 numbers
    """
    if isinstance(checkpoint, (str, Path)):
        checkpoint = read(checkpoint, ignore_classes=ignore_classes)
    options: Any = {"rank": rank, "kernel_sizes": kernel_sizes, "groups": groups, "skip": skip}
    options |= {"strided_one_tap": strided_one_tap, "rename": rename}
    converted, report = convert_state(checkpoint, from_, "sparseconv", **options)
    check_fit(module, converted)
    module.load_state_dict(converted, strict=True)
    return report


def check_fit(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError that names every key, shape and kind of number by which a state differs from a module's."""
    wanted = module.state_dict()
    missing = [f"{k} {tuple(v.shape)}" for k, v in wanted.items() if k not in state]
    unknown = [f"{k} {tuple(v.shape)}" for k, v in state.items() if k not in wanted]
    differ = [
        f"{k} is {tuple(state[k].shape)} {state[k].dtype}, should be {tuple(v.shape)} {v.dtype}"
        for k, v in wanted.items()
        if k in state and (state[k].shape != v.shape or v.is_floating_point() > state[k].is_floating_point())
    ]
    said = [
        f"{len(items)} {word}: {some(items, 12)}"
        for word, items in (("missing", missing), ("unknown", unknown), ("of another shape or dtype", differ))
        if items
    ]
    if said:
        raise ValueError(f"the checkpoint does not fit {type(module).__name__}; " + "; ".join(said))
