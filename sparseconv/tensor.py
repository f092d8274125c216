"""A grid and its features, as networks pass them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.checks import (
    SEVERAL,
    as_device,
    check_integers,
    check_kind,
    check_same_space,
    check_tensor,
    described,
    no_grid,
    rows_of_points,
    warn,
)
from sparseconv.device_mixin import Movable
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.grid import VoxelGrid, in_trace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.views.picture import html
from sparseconv.other_names import attribute_error
from sparseconv.row_functions import ELEMENTWISE_NAMES, check_function, check_operand, method_advice, name_of
from sparseconv.torch_private import collators, register_tree
from sparseconv.transforms import tracing

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32, Integer, Shaped


@dataclass(frozen=True, repr=False)
class SparseTensor(Movable):
    """Features (N, C), one row per voxel of ``grid``, on its device.

    Arithmetic and PyTorch's row-wise functions accept it and keep the voxels: ``2 * x + bias``, ``torch.relu(x)``,
    ``torch.cat([x, y], 1)``. A function that mixes rows raises a TypeError that names the function to use.

    >>> grid = VoxelGrid(torch.tensor([[0, 1, 2], [1, 0, 0], [1, 0, 1]]))
    >>> x = SparseTensor(grid, torch.arange(6.0).view(3, 2))
    >>> [item.tolist() for item in x.to_list()]
    [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    """

    grid: VoxelGrid
    features: Shaped[torch.Tensor, "N C"]

    def __post_init__(self) -> None:
        if not isinstance(self.grid, VoxelGrid):
            check_kind("grid", self.grid, VoxelGrid, _no_grid(self.grid, self.features))
        check_tensor("features", self.features)
        shape = tuple(self.features.shape)
        if len(shape) != 2 or shape[0] != self.grid.num_voxels:
            raise ValueError(
                f"features must be ({self.grid.num_voxels}, C), one row per voxel; got {shape}{rows_of_points(shape)}"
            )
        if self.features.device != self.grid.device:
            there = str(self.features.device)
            raise ValueError(f"features are on {there}, the grid is on {self.grid.device}: move it, grid.to({there!r})")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    if not TYPE_CHECKING:  # to whom every name would exist

        def __getattr__(self, name: str) -> Any:
            raise attribute_error(name, method_advice(name))

    # ---- between layouts

    @classmethod
    def from_list(
        cls,
        coords: Sequence[Integer[torch.Tensor, "_N_b D"]],
        features: Sequence[Shaped[torch.Tensor, "_N_b C"]],
        voxel_size: float | Sequence[float] | None = None,
        origin: float | Sequence[float] | None = None,
    ) -> SparseTensor:
        """One item per scene: coords (N_b, D) integers and features (N_b, C); either may have no row.

        ``voxel_size`` and ``origin`` are those of all scenes, as `VoxelGrid` takes them. Scenes that are sparse tensors
        already are joined by ``torch.utils.data.default_collate``.

        >>> SparseTensor.from_list([torch.tensor([[0, 1]]), torch.tensor([[5, 5]])], [torch.ones(1, 3)] * 2).coords
        tensor([[0, 0, 1],
                [1, 5, 5]], dtype=torch.int32)
        """
        _check_scenes(coords, features)
        wide = [c.long() if c.dtype.itemsize < 4 else c for c in coords]  # 8 bits number no more than 127 scenes
        items = [torch.cat([torch.full_like(c[:, :1], b), c], 1) for b, c in enumerate(wide)]
        return cls(VoxelGrid(torch.cat(items), len(items), voxel_size, origin), torch.cat(list(features)))

    def to_list(self) -> list[Shaped[torch.Tensor, "_N_b C"]]:
        """The features of each batch item (N_b, C), rows in the grid's order."""
        return list(self._grouped().split(self.grid.batch_counts.tolist()))

    @classmethod
    def from_nested(cls, grid: VoxelGrid, nested: Shaped[torch.Tensor, "B _N_b C"]) -> SparseTensor:
        """A jagged `torch.nested` tensor (B, N_b, C) whose items follow the grid's rows of each batch item."""
        check_kind("grid", grid, VoxelGrid, "pass the grid of the voxels")
        if not isinstance(nested, torch.Tensor):
            check_tensor("nested", nested)
        if not nested.is_nested or nested.layout != torch.jagged:
            raise TypeError(f"expected a torch.nested tensor of layout torch.jagged; got layout {nested.layout}")
        values, offsets = nested.values(), nested.offsets()  # type: ignore[attr-defined]
        if not torch.equal(offsets.to(grid.device), grid.batch_offsets):
            raise ValueError(
                f"the items' lengths {offsets.diff().tolist()} are not the grid's {grid.batch_counts.tolist()}"
            )
        if grid.batch_rows is not None:
            values = torch.empty_like(values).index_copy(0, grid.batch_rows, values)
        return cls(grid, values)

    def to_nested(self) -> Shaped[torch.Tensor, "B _N_b C"]:
        """The features as a jagged `torch.nested` tensor (B, N_b, C); differentiable."""
        return torch.nested.nested_tensor_from_jagged(self._grouped(), self.grid.batch_offsets)

    def _grouped(self) -> torch.Tensor:
        rows = self.grid.batch_rows
        return self.features if rows is None else self.features[rows]

    @classmethod
    def from_dense(cls, dense: Shaped[torch.Tensor, "B C *shape"], *, rank: int | None = None) -> SparseTensor:
        """The sites of dense (B, C, *spatial) where any channel is not zero.

        ``rank`` is the number of spatial axes, checked where it is given. A volume (D, H, W) is ``dense[None, None]``.
        """
        check_tensor("dense", dense)
        return cls(*VoxelGrid.from_dense(dense, rank=rank))

    def to_dense(self, extent: IndexRange | Sequence[int] | None = None) -> Shaped[torch.Tensor, "B C *shape"]:
        """(B, C, *shape) over the extent (default: the grid's own), zero where there is no voxel."""
        if extent is not None:
            check_kind("extent", extent, (IndexRange, list, tuple), "pass IndexRange.of_shape(shape), or a shape")
        return self.grid.to_dense(self.features, extent)

    # ---- the same voxels, other features

    def with_features(self, features: Shaped[torch.Tensor, "N C_out"]) -> SparseTensor:
        """Other features (N, C') on the same grid."""
        return SparseTensor(self.grid, features)

    def subset(self, mask: Bool[torch.Tensor, " N"]) -> SparseTensor:
        """The voxels where mask (N,) bool is true, with their features, in the same order: pruning.

        >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 1], [0, 2]])), torch.tensor([[0.5], [-0.5]]))
        >>> x.subset(x.features[:, 0] > 0).coords.tolist()
        [[0, 1]]
        """
        if isinstance(self.grid, FixedGrid):
            return SparseTensor(*self.grid.chosen(mask, self.features))
        grid = self.grid.subset(mask)
        return SparseTensor(grid, self.features[mask])

    def cat(self, *others: SparseTensor) -> SparseTensor:
        """Channels side by side; all on one grid."""
        for other in others:
            check_kind("other", other, SparseTensor, "channels are joined by x.cat(y, z)")
            self._check_same_grid(other)
        return self.with_features(torch.cat([self.features, *(other.features for other in others)], 1))

    def __add__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.add, self, other)

    def __sub__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.sub, self, other)

    def __rsub__(self, other: Any) -> SparseTensor:
        return -self + other

    def __mul__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.mul, self, other)

    def __truediv__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.div, self, other)

    def __rtruediv__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.div, other, self)

    def __pow__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.pow, self, other)

    def __rpow__(self, other: Any) -> SparseTensor:
        return _elementwise(torch.pow, other, self)

    def __neg__(self) -> SparseTensor:
        return self.with_features(-self.features)

    __radd__, __rmul__ = __add__, __mul__
    #: numpy leaves arithmetic with its arrays to this class
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> SparseTensor:
        """Torch's functions on the features, where they make each row of one row; see `sparseconv.row_functions`."""
        kwargs = kwargs or {}
        check_function(func, args, kwargs, SparseTensor)
        given = [*args, *kwargs.values()]
        parts = [part for value in given for part in (value if isinstance(value, (list, tuple)) else (value,))]
        first = next(part for part in parts if isinstance(part, SparseTensor))
        operands = name_of(func) in ELEMENTWISE_NAMES
        mine = [first._features_of(value, operands) for value in args]
        made = func(*mine, **{name: first._features_of(value, operands) for name, value in kwargs.items()})
        return first.with_features(made)

    def _features_of(self, value: Any, operands: bool) -> Any:
        """Features in the place of sparse tensors, in lists too; ``operands``: tensors are checked to fit them."""
        if isinstance(value, (list, tuple)):
            return type(value)([self._features_of(one, operands) for one in value])
        if isinstance(value, SparseTensor):
            self._check_same_grid(value)
            return value.features
        return check_operand(value, self.features) if operands and isinstance(value, torch.Tensor) else value

    def _check_same_grid(self, other: SparseTensor) -> None:
        mine, theirs = self.grid, other.grid
        if tracing() and theirs is not mine:
            mine, theirs = in_trace(mine), in_trace(theirs)
            if mine is theirs or mine.stands_with(theirs):
                return
            mine.leave_trace("while torch traces, tensors on different grid objects are not joined")
        if theirs is not mine and (theirs.batch_size != mine.batch_size or not torch.equal(theirs.coords, mine.coords)):
            raise ValueError(f"the two tensors live on different voxels: {self.grid} and {other.grid}")
        if theirs is not mine and mine.is_placed and theirs.is_placed:
            check_same_space(mine, theirs, True)

    # ---- reading

    @property
    def coords(self) -> Int32[torch.Tensor, "N 1+D"]:
        """(N, 1+D) int32, the batch item first. This is the grid's own tensor: clone it before changing it."""
        return self.grid.coords

    @property
    def shape(self) -> torch.Size:
        """(N, C), that of the features."""
        return self.features.shape

    def dim(self) -> int:
        """2: rows and channels."""
        return 2

    @property
    def channels(self) -> int:
        """C."""
        return self.features.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the features and the grid."""
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.features.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the features require gradients."""
        return self.features.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> SparseTensor:
        """Let autograd record what is done with these features, in place; returns itself."""
        self.features.requires_grad_(requires_grad)
        return self

    def detach(self) -> SparseTensor:
        """The same features without their history, sharing memory."""
        return self.with_features(self.features.detach())

    # ---- elsewhere

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> SparseTensor:
        """Move the grid and the features to a device, cast the features to a dtype, or both."""
        if isinstance(device, torch.dtype) and dtype is None:
            device, dtype = None, device
        if dtype is not None:
            check_kind("dtype", dtype, torch.dtype, "pass torch.float32 or another dtype of torch")
        grid = self.grid if device is None else self.grid.to(as_device(device))
        features = self.features.to(device=grid.device, dtype=dtype or self.dtype)
        return self if grid is self.grid and features is self.features else SparseTensor(grid, features)

    def half(self) -> SparseTensor:
        """The features as float16."""
        return self.to(dtype=torch.float16)

    def bfloat16(self) -> SparseTensor:
        """The features as bfloat16."""
        return self.to(dtype=torch.bfloat16)

    def float(self) -> SparseTensor:
        """The features as float32."""
        return self.to(dtype=torch.float32)

    def double(self) -> SparseTensor:
        """The features as float64."""
        return self.to(dtype=torch.float64)

    def __repr__(self) -> str:
        gradient = ", requires grad" if self.requires_grad else ""
        return f"SparseTensor({self.channels} channels, {self.dtype}{gradient}, on {self.grid})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a line of words, and a picture colored by the length of the features."""
        values = self.features.detach()
        shown = values[:, 0] if self.channels == 1 else values.float().norm(dim=1)
        return html(self.coords, self.grid.voxel_size, repr(self), shown)


def _elementwise(function: Callable[..., torch.Tensor], a: Any, b: Any) -> SparseTensor:
    """A function of two operands, at least one of them a sparse tensor."""
    sparse, other = (a, b) if isinstance(a, SparseTensor) else (b, a)
    if isinstance(other, SparseTensor):
        sparse._check_same_grid(other)
        operand = other.features
    else:
        operand = check_operand(other, sparse.features)
    return sparse.with_features(
        function(sparse.features, operand) if sparse is a else function(operand, sparse.features)
    )


def _no_grid(given: object, features: object) -> str:
    """What to do where something else was given for a grid."""
    if isinstance(features, VoxelGrid):
        return "the grid comes first, SparseTensor(grid, features)"
    if not isinstance(given, (list, tuple)):
        return "pass VoxelGrid(coords)"
    grids = [isinstance(item, VoxelGrid) for item in given]
    if all(grids):
        return "VoxelGrid.cat(grids) makes one batch of several"
    return no_grid(given) if any(grids) else SEVERAL


def _joined(items: list[SparseTensor], *, collate_fn_map: Any = None) -> SparseTensor:
    """Scenes as one batch, for a loader."""
    for number, item in enumerate(items):
        if item.channels != items[0].channels:
            raise ValueError(f"item {number} has {item.channels} channels, item 0 has {items[0].channels}")
    return SparseTensor(VoxelGrid.cat([x.grid for x in items]), torch.cat([x.features for x in items]))


def _joined_grids(items: list[VoxelGrid], *, collate_fn_map: Any = None) -> VoxelGrid:
    """`VoxelGrid.cat`, for a loader."""
    return VoxelGrid.cat(items)


def _with_leaf(leaves: Sequence[Any], grid: VoxelGrid) -> SparseTensor:
    """One of whatever torch puts in the place of features, which is no tensor everywhere."""
    made = object.__new__(SparseTensor)
    object.__setattr__(made, "grid", grid)
    object.__setattr__(made, "features", *leaves)
    return made


register_tree(SparseTensor, lambda x: ([x.features], x.grid), _with_leaf)
collators.update({SparseTensor: _joined, VoxelGrid: _joined_grids})


def _check_scenes(coords: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> None:
    """Raise unless these are voxels (N_b, D) and features (N_b, C) of scenes; warn of a batch column among the axes."""
    for name, items, columns in (("coords", coords, "D"), ("features", features, "C")):
        check_kind(name, items, (list, tuple), "pass a list of tensors, one per scene")
        for number, item in enumerate(items):
            if hasattr(item, "grid"):
                raise TypeError(
                    f"{name}[{number}] is {described(item)}: torch.utils.data.default_collate(scenes) makes one of them"
                )
            check_tensor(f"{name}[{number}]", item)
            if name == "coords":
                check_integers(f"{name}[{number}]", item)
            if item.ndim != 2:
                raise ValueError(f"{name}[{number}] must be (N, {columns}), got shape {tuple(item.shape)}")
    if len(coords) != len(features) or not coords:
        raise ValueError(f"need as many coords as features, at least one; got {len(coords)} and {len(features)}")
    rank, channels = coords[0].shape[1], features[0].shape[1]
    for number, (voxels, rows) in enumerate(zip(coords, features)):
        if len(voxels) != len(rows):
            raise ValueError(f"item {number} has {len(voxels)} voxels, but {len(rows)} rows of features")
        if voxels.shape[1] != rank:
            raise ValueError(f"coords[{number}] has {voxels.shape[1]} axes, coords[0] has {rank}")
        if rows.shape[1] != channels:
            raise ValueError(f"features[{number}] has {rows.shape[1]} channels, features[0] has {channels}")
    advice = "from_list numbers the items itself: where the first column is the batch, pass [c[:, 1:] for c in coords]"
    if rank > 4:
        raise ValueError(f"coords must have 1 to 4 axes; got {rank}. {advice}")
    if rank == 4 and any(map(len, coords)) and all(_is_item(c[:, 0], b) for b, c in enumerate(coords)):
        warn(f"coords with 4 columns become voxels with 4 axes. {advice}")


def _is_item(column: torch.Tensor, number: int) -> bool:
    """Whether a column holds 0 alone, or the number of its scene alone."""
    return bool((column == 0).all() or (column == number).all())
