"""The plan: geometry found once, arithmetic many times."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv import transforms
from sparseconv.autograd import Edges, convolution, edges_tensor
from sparseconv.backends.base import Request
from sparseconv.backends.registry import check_backend, choose
from sparseconv.checks import as_device, check_count, check_tensor, no_batch, rows_of_points, shortened
from sparseconv.device_mixin import Movable
from sparseconv.geometry.edges import check_pair, coarse_grid, find_edges, fine_grid, fits, inside
from sparseconv.geometry.grid import VoxelGrid, check_grid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.projection import IndexProjection
from sparseconv.geometry.ranges import Boundary, check_box
from sparseconv.geometry.window import Window
from sparseconv.plan.explain import Explanation, explain
from sparseconv.plan.fused import fused_convolution
from sparseconv.plan.packed_weights import PackedWeights
from sparseconv.plan.weights import by_tap, packed, packed_as
from sparseconv.torch_private import any_autocast
from sparseconv.transforms import tracing

if TYPE_CHECKING:
    from jaxtyping import Float, Int64, Integer, Shaped

    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction


Axes = int | Sequence[int]


class WeakGrid:
    """A grid that keeps a plan, as that plan holds it. Of an object of this class, a compiler can tell the type."""

    def __init__(self, grid: VoxelGrid) -> None:
        self.grid = weakref.ref(grid)


#: a grid, as a plan holds it
GridRef = VoxelGrid | WeakGrid
#: the tensors that `ConvolutionPlan.execute` takes
OPERANDS = ("x", "weight", "bias", "residual")


class ConvolutionPlan(Movable):
    """The kernel map of a convolution with its two grids, ready to be executed.

        fine = stride * coarse + dilation * tap - padding        (tap = 0 .. kernel_size - 1, per axis)

    The plan maps ``source`` (fine) to ``target`` (coarse). It is frozen, holds no weights, may be shared between
    threads, layers and steps, and pickles.

    Args:
        source: the grid of the inputs.
        kernel_size: taps along each axis, one integer or one per axis; None where ``taps`` are given.
        stride, dilation: one integer or one per axis.
        padding: default floor(dilation * (kernel_size - 1) / 2), torch's phase for "same"; 0 for explicit taps.
        taps: explicit integer taps (K, D) instead of the box, for crosses and custom stencils.
        target: the grid of the outputs; ``"full"`` for every reachable voxel; None for the source itself at stride 1
            and ``"full"`` otherwise.
        boundary: ``"absent"``, ``"forbid"`` or a `Boundary` (`Boundary.periodic(extent)`), on the fine side.
        groups: channel groups; C_in for a depthwise convolution.
        backend: ``"auto"`` or a backend's name.
        deterministic: all built-in backends are deterministic; False also allows backends that are not.

    Raises:
        ValueError, TypeError: invalid arguments; raised before anything is built.

    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]]))
    >>> plan = ConvolutionPlan(grid, 3)
    >>> plan
    ConvolutionPlan(submanifold 3x3, 3 -> 3 voxels, 5 pairs, 1.7 an output, cpu)
    >>> plan.execute(torch.ones(3, 4), torch.ones(9, 4, 2))[:, 0].tolist()
    [8.0, 8.0, 4.0]
    """

    def __init__(
        self,
        source: VoxelGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        target: VoxelGrid | Literal["full"] | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> None:
        if recorder(source) is not None:
            raise ValueError("in a traced network a plan is sparseconv.plan.shared_plan(grid, ...), or a layer's of nn")
        window, edge = checked_window(
            source, kernel_size, stride, dilation, padding, taps, boundary, groups, backend, deterministic
        )
        if isinstance(target, VoxelGrid):
            check_pair(source, target, window)
            if fits(target, source, window, edge) is not target:
                raise ValueError(f"some windows of the given target leave the extent {edge.extent or source.extent}")
            coarse = target
        elif (isinstance(target, str) and target == "full") or (target is None and window.is_strided):
            coarse = coarse_grid(source, window, edge)
        elif target is None:
            coarse = fits(source, source, window, edge)
        else:
            kind = ValueError if isinstance(target, str) else TypeError
            raise kind(f"target must be a VoxelGrid, 'full' or None; got {shortened(target)}: pass VoxelGrid(coords)")
        self._join(source, coarse, window, edge, kernel_size is not None, groups, backend, False)
        reached = coarse is not target and coarse is not source  # every voxel of the source lies in some window
        if window.is_tiling and edge.kind == "absent" and (reached or self.kernel_map.identity_tap is not None):
            self.kernel_map.meets_all = True
            if source.count is None or self.kernel_map.padded:
                self.kernel_map.num_pairs = len(source)  # which then waits for no count of the device

    @classmethod
    def transposed(
        cls,
        source: VoxelGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        target: VoxelGrid | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> ConvolutionPlan:
        """A plan from coarse voxels to fine ones: onto ``target``, or onto every voxel that a tap reaches (generative).

        Arguments are those of `ConvolutionPlan`. To invert an earlier plan exactly, use its `transpose()`.
        """
        if (recorded := recorder(source)) is not None:
            size = {"stride": stride, "dilation": dilation, "padding": padding, "taps": taps, "target": target}
            options = {"boundary": boundary, "groups": groups, "backend": backend, "deterministic": deterministic}
            return recorded.transposed(source, kernel_size, **size, **options)
        window, edge = checked_window(
            source, kernel_size, stride, dilation, padding, taps, boundary, groups, backend, deterministic
        )
        if target is not None and not isinstance(target, VoxelGrid):
            raise TypeError(f"target of a transposed plan must be a VoxelGrid or None; got {target!r}")
        fine = fine_grid(source, window, edge) if target is None else inside(target, edge)
        return cls.between(source, fine, window, edge, kernel_size is not None, groups, backend, True)

    @classmethod
    def between(
        cls,
        source: VoxelGrid,
        target: VoxelGrid,
        window: Window,
        boundary: Boundary,
        box: bool = True,
        groups: int = 1,
        backend: str = "auto",
        is_transposed: bool = False,
    ) -> ConvolutionPlan:
        """The plan of a window between two given grids; ``box`` says that its taps fill a box."""
        plan = object.__new__(cls)
        plan._join(source, target, window, boundary, box, groups, backend, is_transposed)
        return plan

    @transforms.untraced
    def _join(
        self,
        source: VoxelGrid,
        target: VoxelGrid,
        window: Window,
        boundary: Boundary,
        box: bool,
        groups: int,
        backend: str,
        is_transposed: bool,
    ) -> None:
        fine, coarse = (target, source) if is_transposed else (source, target)
        edges = find_edges(fine, coarse, window, boundary)
        self._source: GridRef = source
        self._target: GridRef = target
        self.window, self.boundary = window, boundary
        self.kernel_map = edges.reverse() if is_transposed else edges
        self.groups, self.backend, self.is_transposed = groups, backend, is_transposed
        #: taps along each axis, (k0, ..., kD-1); None where the taps are an explicit list
        self.kernel_size = window.projection.counts if box else None
        self._edges_tensor = edges_tensor(self.kernel_map)

    @transforms.untraced
    def replaced(self, kernel_map: KernelMap, **changes: Any) -> ConvolutionPlan:
        """This plan with other edges, and whatever else ``changes`` names (source, target, groups, is_transposed)."""
        for side in ("source", "target"):
            if side in changes:
                changes[f"_{side}"] = changes.pop(side)
        plan = object.__new__(ConvolutionPlan)
        plan.__setstate__({**self.__dict__, "kernel_map": kernel_map, **changes})
        return plan

    # ---- reading

    @property
    def source(self) -> VoxelGrid:
        """The grid of the inputs."""
        return resolved(self._source)

    @property
    def target(self) -> VoxelGrid:
        """The grid of the outputs."""
        return resolved(self._target)

    @property
    def projection(self) -> IndexProjection:
        """The index projection from coarse voxels to the boxes of fine voxels in their receptive field."""
        return self.window.projection

    @property
    def num_taps(self) -> int:
        return self.kernel_map.num_taps

    @property
    def max_pairs_per_tap(self) -> int:
        """Rows of the largest buffer that a tap's edges need."""
        return self.kernel_map.max_pairs_per_tap

    max_buffer_size = max_pairs_per_tap  # as other libraries call it

    @property
    def num_in(self) -> int:
        """N_in, the rows of x."""
        return self.kernel_map.num_in

    @property
    def coverage(self) -> Int64[torch.Tensor, " K+1"]:
        """(K+1,) int64 on the CPU: how many outputs have 0, 1, ..., K inputs."""
        return self.kernel_map.coverage

    @property
    def device(self) -> torch.device:
        return self.kernel_map.device

    def request(self, c_in: int, c_out: int, dtype: torch.dtype = torch.float32) -> Request:
        """The request that a backend would receive for these channels."""
        return Request(self.kernel_map, self.device, dtype, c_in, c_out, self.groups)

    def workspace_bytes(self, c_in: int, c_out: int, dtype: torch.dtype = torch.float32) -> int:
        """The peak memory in bytes that a forward or backward call allocates in addition to its result."""
        request = self.request(c_in, c_out, dtype)
        return choose(request, self.backend).workspace_bytes(request)

    def explain(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"] | Float[torch.Tensor, "C_out C_in/G *kernel"] | PackedWeights,
    ) -> Explanation:
        """Which backend would execute this call, why the others would not, and what it costs; print the result."""
        check_tensor("x", x)
        given = weight if not isinstance(weight, PackedWeights) else self._taps_of(weight, x)
        check_tensor("weight", given)
        taps = by_tap(given, self.kernel_size, self.num_taps)
        return explain(repr(self), self.backend, self.request(taps.shape[1] * self.groups, taps.shape[2], x.dtype))

    # ---- executing

    def pack(self, weight: Float[torch.Tensor, " ..."]) -> PackedWeights:
        """A frozen copy of a weight of any layout in the layout that kernels read, to be passed as the weight.

        Raises ValueError or TypeError for a weight that does not fit the taps, or is not floating point.
        """
        check_tensor("weight", weight)
        if not weight.is_floating_point():
            raise TypeError(f"weight must be floating point; got {weight.dtype}")
        taps = by_tap(weight, self.kernel_size, self.num_taps)
        with torch.inference_mode(False), torch.no_grad():  # so that a later call can save it for an input's gradient
            copied = taps.clone(memory_format=torch.contiguous_format)
        return PackedWeights(copied, self.kernel_size or self.window.offsets, self.groups, weight.requires_grad)

    def execute(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"] | Float[torch.Tensor, "C_out C_in/G *kernel"] | PackedWeights,
        bias: Float[torch.Tensor, " C_out"] | None = None,
        *,
        residual: Float[torch.Tensor, "N_out C_out"] | None = None,
        epilogue: Epilogue | PointwiseDynamicFunction | None = None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """Convolve: y[out] = epilogue(sum over edges (k, in, out) of x[in] @ weight[k] + bias + residual[out]).

        Args:
            x: (N_in, C_in) floating point on the plan's device, any strides; rows in the order of ``source``.
            weight: (K, C_in/G, C_out), or torch's (C_out, C_in/G, *kernel) where D > 1, or packed; dtype, device of x.
            bias: (C_out,) or None.
            residual: (N_out, C_out) or None, added before the epilogue.
            epilogue: an activation made with `pointwise_dynamic`, or an `Epilogue` that binds its numbers. Inlined in
                the convolution's store where the backend can, run after it elsewhere, with the same result.

        Returns:
            y (N_out, C_out) in the order of ``target``, dtype of x (under autocast, autocast's). Accumulated in fp32
            (fp64 for fp64); the same bits in every run; differentiable to any order in all its tensors.

        Raises:
            ValueError: shapes, channels or devices that do not fit. TypeError: dtypes that differ or are not floating.
        """
        x, taps, bias, residual = self.operands(x, weight, bias, residual)
        edges: Edges = self._edges_tensor if torch.compiler.is_compiling() else self.kernel_map
        call = (edges, self.groups, self.backend)
        if residual is None and epilogue is None:
            return convolution(x, taps, bias, *call)
        return fused_convolution(x, taps, bias, residual, as_epilogue(epilogue), *call)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "a plan is not a layer: call plan.execute(x, weight), or pass it to a layer, layer(x, plan=plan)"
        )

    def operands(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"] | Float[torch.Tensor, "C_out C_in/G *kernel"] | PackedWeights,
        bias: Float[torch.Tensor, " C_out"] | None = None,
        residual: Float[torch.Tensor, "N_out C_out"] | None = None,
    ) -> tuple[
        Float[torch.Tensor, "N_in C_in"],
        Float[torch.Tensor, "K C_in/G C_out"],
        Float[torch.Tensor, " C_out"] | None,
        Float[torch.Tensor, "N_out C_out"] | None,
    ]:
        """The checked operands of `execute`: cast under autocast, the weight packed as (K, C_in/G, C_out)."""
        transforms.check_not_recorded()
        given = weight if not isinstance(weight, PackedWeights) else self._taps_of(weight, x)
        check_places(self.kernel_map.device, x, given, bias, residual)
        taps = by_tap(given, self.kernel_size, self.kernel_map.num_taps)
        if torch.compiler.is_compiling() or any_autocast():  # a question that cannot be traced
            x, taps, bias, residual = autocast(x, taps, bias, residual)
        taps = taps if taps.is_contiguous() else packed(taps)
        check_operands(self.kernel_map, self.groups, x, given, taps, bias, residual)
        return x, taps, bias, residual

    def _taps_of(self, weight: PackedWeights, x: object) -> torch.Tensor:
        return weight.for_call(self.kernel_size, self.window.offsets, self.groups, x)

    def localize(self, x: Shaped[torch.Tensor, "N_in ..."]) -> tuple[Shaped[torch.Tensor, "N_in ..."], ConvolutionPlan]:
        """The rows and the local plan that an operation over edges works on; a sharded plan adds its halo."""
        return x, self

    # ---- other plans

    def transpose(self) -> ConvolutionPlan:
        """The same edges reversed, in O(1): from this plan's target back onto its source.

        It takes its own weight (K, C_in, C_out) in its own direction; with the weight's channels exchanged it is the
        exact adjoint of this plan.
        """
        sides = {"source": self._target, "target": self._source}
        return self.replaced(self.kernel_map.reverse(), **sides, is_transposed=not self.is_transposed)

    def with_groups(self, groups: int) -> ConvolutionPlan:
        """The same edges for another number of channel groups; itself if it has that number."""
        check_count("groups", groups, 1)
        return self if groups == self.groups else self.replaced(self.kernel_map, groups=groups)

    def weak_copy(self, grid: VoxelGrid) -> ConvolutionPlan:
        """This plan as ``grid`` may keep it: without keeping that grid alive, which would be a cycle.

        The memory of a scene is then freed with its grid, and does not wait for the garbage collector.
        """
        if self._source is not grid and self._target is not grid:
            return self
        plan = object.__new__(ConvolutionPlan)
        plan.__dict__.update(self.__dict__)
        weakly = WeakGrid(grid)  # one for both sides, which are compared
        for side in ("_source", "_target"):
            if plan.__dict__[side] is grid:
                plan.__dict__[side] = weakly
        return plan

    def to(self, device: torch.device | str) -> ConvolutionPlan:
        """This plan on another device; returns itself if it is already there."""
        device = as_device(device)
        kernel_map = self.kernel_map.to(device)
        if kernel_map is self.kernel_map:
            return self
        source = self.source.to(device)
        target = source if self._target is self._source else self.target.to(device)
        return self.replaced(kernel_map, source=source, target=target)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k != "_edges_tensor"}
        return state | {"_source": self.source, "_target": self.target}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._edges_tensor = edges_tensor(self.kernel_map)

    def __repr__(self) -> str:
        edges = self.kernel_map
        size = "x".join(map(str, self.kernel_size)) if self.kernel_size else f"{self.num_taps} taps"
        kind = "transposed" if self.is_transposed else "submanifold" if self._target is self._source else "convolution"
        words = [f"{kind} {size}"]
        if self.window.is_strided:
            words.append("stride " + "x".join(map(str, self.window.stride)))
        if any(d != 1 for d in self.projection.step):
            words.append("dilation " + "x".join(map(str, self.projection.step)))
        if self.boundary.kind != "absent":
            words.append(self.boundary.kind)
        if self.groups > 1:
            words.append(f"{self.groups} groups")
        words.append(f"{edges.num_in:,} -> {edges.num_out:,} voxels")
        words.append(f"{edges.num_pairs:,} pairs, {edges.num_pairs / max(1, edges.num_out):.1f} an output")
        return f"ConvolutionPlan({', '.join(words)}, {self.device})"


# ---- arguments, checked before anything is built or launched


def checked_window(
    source: VoxelGrid,
    kernel_size: Axes | None,
    stride: Axes,
    dilation: Axes,
    padding: Axes | None,
    taps: torch.Tensor | Sequence[Sequence[int]] | None,
    boundary: Boundary | str,
    groups: int,
    backend: str,
    deterministic: bool | None = None,
) -> tuple[Window, Boundary]:
    """What both constructors take, checked: the window and the boundary."""
    check_grid("source", source)
    if type(kernel_size) is not int and isinstance(kernel_size, Sequence) and len(kernel_size) == source.rank + 1:
        raise ValueError(f"kernel_size {kernel_size} has an axis more than {source}: {no_batch(source.rank)}")
    check_count("groups", groups, 1)
    check_backend(backend)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True, False or None; got {deterministic!r}")
    window = Window.of(source.rank, kernel_size, stride, dilation, padding, taps)
    return window, checked_boundary(boundary, source.rank)


def checked_boundary(boundary: Boundary | str, rank: int) -> Boundary:
    """A boundary whose extent, where it has one, is a box of that rank within 32 bits."""
    if isinstance(boundary, str):
        return _plain_boundary(boundary)
    if not isinstance(boundary, Boundary):
        raise TypeError(f"boundary must be 'absent', 'forbid' or a Boundary; got {boundary!r}")
    extent = boundary.extent
    if extent is not None:
        if extent.rank != rank:
            raise ValueError(f"the boundary's extent must have {rank} axes, as the grid has; got {extent}")
        check_box(extent, "the boundary's extent")
        if boundary.kind == "absent":
            raise ValueError(
                f"under 'absent' the space has no end, but the boundary has the extent {extent}: drop it, or take the "
                "grid's subset of voxels within"
            )
    return boundary


@cache
def _plain_boundary(kind: Any) -> Boundary:
    return Boundary(kind)


def check_places(device: torch.device, *operands: torch.Tensor | None) -> None:
    """Raise for operands of `ConvolutionPlan.execute`, x, weight, bias and residual, that are no plain tensors, or not
    on the plan's device."""
    fit = operands[0] is not None and operands[1] is not None
    for t in operands:  # names come later: each call runs this
        fit &= t is None or (
            isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested and t.device == device
        )
    if fit:
        return
    tensor: Any
    for name, tensor in zip(OPERANDS, operands):
        if tensor is None and name in ("bias", "residual"):
            continue
        check_tensor(name, tensor)
        if tensor.device != device:
            there = str(tensor.device)
            advice = f"move it, or the plan, plan.to({there!r})"
            if name in ("weight", "bias"):
                advice = (
                    f"move it, a network by net.to({str(device)!r}), or the scene before a plan is made of its grid"
                )
            raise ValueError(f"the plan is on {device} but {name} is on {there}: {advice}")


def check_operands(
    kernel_map: KernelMap,
    groups: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Raise for operands of `ConvolutionPlan.execute` that do not fit; ``taps`` is the weight by tap."""
    rows = kernel_map.num_in
    shape, (_, group_in, c_out), dtype = x.shape, taps.shape, x.dtype
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(
            f"x must be ({rows}, C_in), one row per voxel of the source grid; got {tuple(shape)}{rows_of_points(shape)}"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"x must be floating point; got {dtype}")
    if group_in * groups != shape[1]:
        raise ValueError(
            f"x has {shape[1]} channels, but the weight {tuple(weight.shape)} takes {group_in * groups} "
            f"(C_in/G = {group_in} in {groups} groups)"
        )
    if c_out % groups:
        raise ValueError(f"C_out = {c_out} must be a multiple of groups = {groups}")
    if bias is not None and bias.shape != (c_out,):
        raise ValueError(f"bias must be ({c_out},); got {tuple(bias.shape)}")
    if residual is not None and residual.shape != (kernel_map.num_out, c_out):
        raise ValueError(f"residual must be ({kernel_map.num_out}, {c_out}); got {tuple(residual.shape)}")
    for tensor in (taps, bias, residual):
        if tensor is not None and tensor.dtype != dtype:
            name = "weight" if tensor is taps else "bias" if tensor is bias else "residual"
            raise TypeError(f"x is {dtype} but the {name} is {tensor.dtype}: cast one, or use torch.autocast")


def autocast(x: torch.Tensor, taps: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The tensors in the dtype that an enclosing autocast asks for; fp64 is left alone, as torch does.

    Taps (K, C_in/G, C_out) that are cast are contiguous: one copy does both.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, taps, *others
    dtype = torch.get_autocast_dtype(kind)
    cast = [t if t is None or t.dtype == dtype else t.to(dtype) for t in (x, *others)]
    return cast[0], packed_as(taps, dtype), *cast[1:]


def as_epilogue(given: Epilogue | PointwiseDynamicFunction | None) -> Epilogue | None:
    """What `ConvolutionPlan.execute` was given as epilogue, its numbers bound; None for none."""
    if given is None:
        return None
    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction  # loaded where they are used

    if isinstance(given, Epilogue):
        return given
    if isinstance(given, PointwiseDynamicFunction):
        return Epilogue(given)
    raise TypeError(
        f"epilogue must be a function made with pointwise_dynamic, or an Epilogue of one; got {type(given).__name__}: "
        "sparseconv.pointwise has relu, silu, gelu and others"
    )


def recorder(source: Any) -> Any:
    """The class of plans on a grid of a trace, by torch.export or for streaming; None of any other grid."""
    kind = getattr(source, "plan_type", None)
    return kind if kind is not None and (tracing() or source.is_watched) else None


def resolved(grid: GridRef) -> VoxelGrid:
    """The grid, which a plan kept with it holds weakly."""
    if not isinstance(grid, WeakGrid):
        return grid
    alive = grid.grid()
    if alive is None:
        raise RuntimeError(
            "the grid that kept this plan was freed: keep a reference to the grid as long as you use the plan's grids"
        )
    return alive
