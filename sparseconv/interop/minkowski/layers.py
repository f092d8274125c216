"""Layers with MinkowskiEngine's names: convolutions, pools, pruning, union, interpolation and broadcasts."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.checks import INTEGERS, check_kind, check_mask, check_values, described, no_batch
from sparseconv.interop.arguments import check_features, integers, specialized, trace_constants, uniform_
from sparseconv.interop.minkowski.common import (
    Axes,
    BroadcastMode,
    ConvolutionMode,
    CoordinateMapKey,
    KernelGenerator,
    PoolingMode,
    RegionType,
    rank_of,
)
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager, divided, same
from sparseconv.interop.minkowski.sparse_tensor import (
    SparseTensor,
    TensorField,
    features_of,
)
from sparseconv.ops.neighborhood import depthwise_convolution
from sparseconv.ops.points import PointGroups, Reduce
from sparseconv.ops.pooling import avg_pool, max_pool, sum_pool
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.transforms import tracing

#: coordinates that a layer is given for its output: (M, 1+D), a key of the same manager, or a tensor with one
Place = torch.Tensor | CoordinateMapKey | SparseTensor


def check_input(input: Any, dimension: int | None) -> None:
    """Raise unless a layer of so many axes, or of any, can take this."""
    if not isinstance(input, SparseTensor):
        raise TypeError(f"the layer takes a SparseTensor of MinkowskiEngine's, not {described(input)}")
    if dimension not in (None, input.D):
        advice = f". {no_batch(input.D)}" if dimension == input.D + 1 else ""
        raise ValueError(f"the layer has dimension={dimension}; the input has {input.D} axes{advice}")


def place_key(
    input: SparseTensor, manager: Any, coordinates: Place | None, kernel: KernelGenerator, transposed: bool = False
) -> CoordinateMapKey | None:
    """The key of given coordinates, which lie at the output's tensor stride; None where there are none."""
    if coordinates is None or isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        if not same(coordinates.coordinate_manager, manager):
            raise ValueError("the tensor whose coordinates the output takes has another coordinate manager")
        return coordinates.key
    if not isinstance(coordinates, torch.Tensor):
        raise TypeError(
            f"coordinates must be a tensor (M, 1+D), a CoordinateMapKey or a SparseTensor; got {coordinates!r}"
        )
    own, steps = input.tensor_stride, trace_constants(kernel.kernel_stride)
    stride = divided(own, steps) if transposed else [t * s for t, s in zip(own, steps)]
    return manager.insert_and_map(coordinates, stride)[0]


def output_key(
    key: CoordinateMapKey,
    out_key: CoordinateMapKey | None,
    manager: CoordinateManager,
    kernel: KernelGenerator,
    transposed: bool = False,
    expand: bool = False,
) -> CoordinateMapKey:
    """The key of a layer's output: the one given, set to the voxels that the kernel reaches where it was not."""
    if out_key is not None and out_key.is_key_set():
        return out_key
    reached = manager.reached(key, kernel, transposed, expand)
    if out_key is None:
        return reached
    out_key.set_key(*reached.get_key())
    return out_key


def given_manager(manager: CoordinateManager | None) -> CoordinateManager:
    """The manager of a function's keys, which MinkowskiEngine puts behind arguments that may be left out."""
    if manager is None:
        raise TypeError("the function takes the coordinate manager of its keys; got None")
    return manager


# ---- convolutions: ``kernel`` (V, C_in, C_out), ``bias`` (1, C_out)


class MinkowskiModuleBase(torch.nn.Module):
    """The class of all layers here."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _set_kernel(
        self, generator: KernelGenerator | None, kernel_size: Axes, stride: Axes, dilation: Axes, dimension: int | None
    ) -> KernelGenerator:
        """Keep the kernel of a layer, made of its sizes where it was not given, and the number of axes."""
        self.dimension = rank_of(dimension)
        if generator is None:
            generator = KernelGenerator(kernel_size, stride, dilation, dimension=self.dimension)
        check_kind("kernel_generator", generator, KernelGenerator, "leave it out, or make one")
        self.kernel_generator: KernelGenerator = generator
        return generator

    def _output(
        self, input: Any, coordinates: Place | None, transposed: bool = False, expand: bool = False
    ) -> tuple[CoordinateManager, CoordinateMapKey]:
        """The manager of an input, and the key of the output at given coordinates or at those that a layer finds."""
        check_input(input, self.dimension)
        manager, kernel = input.coordinate_manager, self.kernel_generator
        given = place_key(input, manager, coordinates, kernel, transposed)
        return manager, output_key(input.key, given, manager, kernel, transposed, expand)


def gradcheck(func: Any, inputs: Any, **options: Any) -> bool:
    """``torch.autograd.gradcheck`` of ``func.apply``, for the functions here."""
    return torch.autograd.gradcheck(lambda *x: func.apply(*x), inputs, **options)


class MinkowskiConvolutionFunction:
    """The convolution as a function of features and kernel; differentiable to any order."""

    transposed = False

    @classmethod
    def apply(
        cls,
        input_features: torch.Tensor,
        kernel_weights: torch.Tensor,
        kernel_generator: KernelGenerator,
        convolution_mode: ConvolutionMode,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C_in) -> (N_out, C_out); an output key that is not set is set to the voxels reached."""
        manager, kernel = given_manager(coordinate_manager), kernel_generator
        ends = in_coordinate_map_key, out_coordinate_map_key
        key = output_key(*ends, manager, kernel, cls.transposed, kernel.expand_coordinates)
        plan = manager.plan(in_coordinate_map_key, key, kernel, cls.transposed)
        return plan.execute(input_features, kernel_weights if kernel_weights.ndim == 3 else kernel_weights[None])


class MinkowskiConvolutionTransposeFunction(MinkowskiConvolutionFunction):
    """The transposed convolution as a function."""

    transposed = True


class MinkowskiConvolutionBase(MinkowskiModuleBase):
    """Any of the convolutions below.

        in = out + tap * dilation * tensor stride        (transposed: the other way round)

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride, dilation: one integer or one per axis; a ``kernel_generator`` stands in place of them.
        bias: add a number to each channel.
        expand_coordinates: outputs are all voxels that the kernel reaches, not those that exist already.
        convolution_mode: accepted, without effect.
        dimension: number of axes.
        has_bias, generate_new_coords: the names of ``bias`` and ``expand_coordinates`` in version 0.4.

    A layer of one tap at stride 1 has the weight (C_in, C_out).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
        has_bias: bool | None = None,
        generate_new_coords: bool | None = None,
    ) -> None:
        super().__init__()
        kernel = self._set_kernel(kernel_generator, kernel_size, stride, dilation, dimension)
        kernel.expand_coordinates = expand_coordinates if generate_new_coords is None else generate_new_coords
        self.in_channels, self.out_channels = integers([in_channels, out_channels], "channels", 1)
        self.is_transpose, self.convolution_mode = is_transpose, convolution_mode
        self.use_mm = kernel.kernel_volume == 1 and all(s == 1 for s in kernel.kernel_stride)
        shape = self.in_channels, self.out_channels
        self.kernel = torch.nn.Parameter(torch.empty(shape if self.use_mm else (kernel.kernel_volume, *shape)))
        biased = bias if has_bias is None else has_bias
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(1, self.out_channels)) if biased else None)
        self.reset_parameters(is_transpose)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        """Uniform in +-1/sqrt(n), n being taps times channels of the input (of the output, where transposed)."""
        channels = self.out_channels if is_transpose else self.in_channels
        uniform_(channels * self.kernel_generator.kernel_volume, self.kernel, self.bias)

    def forward(self, input: SparseTensor, coordinates: Place | None = None) -> SparseTensor:
        """A `SparseTensor` -> one at ``coordinates``, or at the voxels of the output's tensor stride."""
        if tracing() and isinstance(coordinates, torch.Tensor):
            return transforms.eagerly(self.forward, input, coordinates)
        check_input(input, self.dimension)
        if input.F.shape[1] != self.in_channels:
            raise ValueError(f"the layer takes {self.in_channels} channels; got {tuple(input.F.shape)}")
        if self.use_mm and coordinates is None:
            product = input.F @ self.kernel
            return input.like(product if self.bias is None else product + self.bias.to(product.dtype))
        kernel, transposed = self.kernel_generator, self.is_transpose
        manager, key = self._output(input, coordinates, transposed, kernel.expand_coordinates)
        taps = self.kernel[None] if self.use_mm else self.kernel
        bias = None if self.bias is None else self.bias.reshape(-1)
        return input.placed(manager.plan(input.key, key, kernel, transposed).execute(input.F, taps, bias), key, manager)

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        size = f"kernel_size={kernel.kernel_size}"
        if kernel.region_type is RegionType.CUSTOM:
            size = f"region_type={kernel.region_type}, kernel_volume={kernel.kernel_volume}"
        return (
            f"{type(self).__name__}(in={self.in_channels}, out={self.out_channels}, {size}, "
            f"stride={kernel.kernel_stride}, dilation={kernel.kernel_dilation})"
        )


_SIZES = "in_channels out_channels kernel_size stride dilation bias kernel_generator"
_LAST = "convolution_mode dimension"
_OLD = "has_bias generate_new_coords"

MinkowskiConvolution = specialized(
    MinkowskiConvolutionBase,
    "MinkowskiConvolution",
    "A convolution: its outputs are the input's voxels at stride 1, and floor(c / s) * s at other strides.",
    f"{_SIZES} expand_coordinates {_LAST} {_OLD}",
    {"dimension": None},
    is_transpose=False,
)
MinkowskiConvolutionTranspose = specialized(
    MinkowskiConvolutionBase,
    "MinkowskiConvolutionTranspose",
    "A transposed convolution onto the voxels of the finer tensor stride; without any, all that it reaches.",
    f"{_SIZES} expand_coordinates {_LAST} {_OLD}",
    {"dimension": None},
    is_transpose=True,
)
MinkowskiGenerativeConvolutionTranspose = specialized(
    MinkowskiConvolutionBase,
    "MinkowskiGenerativeConvolutionTranspose",
    "A transposed convolution onto every voxel that it reaches.",
    f"{_SIZES} {_LAST}",
    {"dimension": None},
    is_transpose=True,
    expand_coordinates=True,
)


class MinkowskiChannelwiseConvolution(MinkowskiModuleBase):
    """A convolution of every channel by itself; ``kernel`` (V, C), ``bias`` (1, C). Arguments as above."""

    def __init__(
        self,
        in_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        (self.in_channels,) = integers([in_channels], "in_channels", 1)
        kernel = self._set_kernel(kernel_generator, kernel_size, stride, dilation, dimension)
        self.kernel_shape = kernel.kernel_volume, self.in_channels
        self.kernel = torch.nn.Parameter(torch.empty(self.kernel_shape))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(1, self.in_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(taps times channels)."""
        uniform_(self.in_channels * self.kernel_generator.kernel_volume, self.kernel, self.bias)

    def forward(self, input: SparseTensor, coords: Place | None = None) -> SparseTensor:
        if tracing():  # there is no operator for it
            return transforms.eagerly(self.forward, input, coords)
        manager, key = self._output(input, coords)
        out = depthwise_convolution(input.F, self.kernel, manager.plan(input.key, key, self.kernel_generator))
        return input.placed(out if self.bias is None else out + self.bias.to(out.dtype), key, manager)

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        return (
            f"{type(self).__name__}(in={self.in_channels}, region_type={kernel.region_type}, "
            f"kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, dilation={kernel.kernel_dilation})"
        )


# ---- pooling over kernels


def _how(mode: PoolingMode) -> Reduce:
    """What a mode does, which is the second word of its name."""
    words: dict[str, Reduce] = {"SUM": "sum", "AVG": "mean", "MAX": "max"}
    return words[mode.name.split("_")[1]]


def _pool(
    features: torch.Tensor,
    mode: PoolingMode,
    kernel: KernelGenerator,
    in_key: CoordinateMapKey,
    out_key: CoordinateMapKey,
    manager: CoordinateManager,
    transposed: bool,
) -> torch.Tensor:
    """Pool over a kernel; over the cells of the coarser tensor stride, where kernel size and stride are equal."""
    plan: ConvolutionPlan | None
    if kernel.kernel_size == kernel.kernel_stride:
        plan = manager.cells_plan(in_key, out_key, transposed)
    else:
        plan = manager.plan(in_key, out_key, kernel, transposed)
    if plan is None:
        if transposed:
            return manager.groups(out_key, in_key).spread(features)
        return manager.groups(in_key, out_key).reduce(features, _how(mode))
    if transposed or mode is PoolingMode.LOCAL_SUM_POOLING:
        return sum_pool(features, plan)
    return avg_pool(features, plan) if mode is PoolingMode.LOCAL_AVG_POOLING else max_pool(features, plan)[0]


class MinkowskiLocalPoolingFunction:
    """Pooling over a kernel as a function of features; differentiable to any order."""

    transposed = False

    @classmethod
    def apply(
        cls,
        input_features: torch.Tensor,
        pooling_mode: PoolingMode,
        kernel_generator: KernelGenerator,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (N_out, C)."""
        manager, kernel = given_manager(coordinate_manager), kernel_generator
        given = in_coordinate_map_key, out_coordinate_map_key
        key = output_key(*given, manager, kernel, cls.transposed, cls.transposed and kernel.expand_coordinates)
        return _pool(input_features, pooling_mode, kernel, in_coordinate_map_key, key, manager, cls.transposed)


class MinkowskiLocalPoolingTransposeFunction(MinkowskiLocalPoolingFunction):
    """The transposed pooling as a function."""

    transposed = True


class MinkowskiPoolingBase(MinkowskiModuleBase):
    """Pooling over a kernel.

    Args:
        kernel_size, stride, dilation: one integer or one per axis; a ``kernel_generator`` stands in place of them.
        dimension: number of axes.

    Where kernel size and stride are equal, a cell of the coarser tensor stride is pooled: 0 .. k-1 in front of its
    corner, for odd kernels too. Absent voxels do not count; an output that sees none is 0.
    """

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes = 1,
        dilation: Axes = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
    ) -> None:
        super().__init__()
        self._set_kernel(kernel_generator, kernel_size, stride, dilation, dimension)
        self.is_transpose, self.pooling_mode = is_transpose, pooling_mode

    def forward(self, input: SparseTensor, coordinates: Place | None = None) -> SparseTensor:
        kernel, transposed = self.kernel_generator, self.is_transpose
        manager, key = self._output(input, coordinates, transposed, transposed and kernel.expand_coordinates)
        return input.placed(
            _pool(input.F, self.pooling_mode, kernel, input.key, key, manager, transposed), key, manager
        )

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        return (
            f"{type(self).__name__}(kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, "
            f"dilation={kernel.kernel_dilation})"
        )


MinkowskiSumPooling, MinkowskiAvgPooling, MinkowskiMaxPooling = (
    specialized(
        MinkowskiPoolingBase,
        f"Minkowski{name}Pooling",
        f"The {word} of the voxels that each output sees.",
        "kernel_size stride dilation kernel_generator dimension",
        {"kernel_size": -1, "dimension": None},
        pooling_mode=PoolingMode[f"LOCAL_{name.upper()}_POOLING"],
    )
    for name, word in (("Sum", "sum"), ("Avg", "mean"), ("Max", "maximum"))
)


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Each fine voxel takes the sum of the coarse voxels that see it: the transpose of the sum."""

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes,
        dilation: Axes = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, dilation, kernel_generator, True, dimension=dimension)
        if kernel_generator is None:
            self.kernel_generator.expand_coordinates = expand_coordinates


# ---- pooling over whole batch items


def _global(
    features: torch.Tensor, mode: PoolingMode, key: CoordinateMapKey, manager: CoordinateManager
) -> torch.Tensor:
    """(B, C): the rows of each batch item reduced; 0 for an item without any."""
    out = manager.rows_of(key).items.reduce(features, _how(mode))
    missing = manager.batch_size - len(out)
    return torch.cat([out, out.new_zeros(missing, out.shape[1])]) if missing else out


class MinkowskiGlobalPoolingFunction:
    """Pooling over batch items as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        pooling_mode: PoolingMode,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (B, C)."""
        manager = given_manager(coordinate_manager)
        if out_coordinate_map_key is not None and not out_coordinate_map_key.is_key_set():
            out_coordinate_map_key.set_key(*manager.origin().get_key())
        return _global(input_features, pooling_mode, in_coordinate_map_key, manager)


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """The mean, sum or maximum of each batch item, at the origin: one row per item, 0 for an item without a voxel."""

    MODE = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX

    def __init__(self, mode: PoolingMode | None = None, dimension: int | None = None) -> None:
        super().__init__()
        if mode is not None and not (isinstance(mode, PoolingMode) and mode.name.startswith("GLOBAL")):
            raise TypeError(f"mode must be a global PoolingMode; got {mode!r}")
        self.pooling_mode = self.MODE if mode is None else mode

    def forward(self, input: SparseTensor | TensorField, coordinates: Any = None) -> SparseTensor:
        features, manager = features_of(input), input.coordinate_manager
        return input.placed(_global(features, self.pooling_mode, input.key, manager), manager.origin(), manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.pooling_mode})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """The sum of each batch item."""

    MODE = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """The mean of each batch item."""


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """The maximum of each batch item."""

    MODE = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX


class MinkowskiDirectMaxPoolingFunction:
    """The maximum over given pairs of rows."""

    @staticmethod
    def apply(
        in_map: torch.Tensor, out_map: torch.Tensor, in_feat: torch.Tensor, out_nrows: int, is_sorted: bool = False
    ) -> torch.Tensor:
        """y[o] = the maximum of x[in_map[p]] over the pairs p with out_map[p] = o: (N, C) -> (out_nrows, C)."""
        check_values("in_map", in_map, "(P,) integers")
        check_values("out_map", out_map, "(P,) integers")
        check_features("in_feat", in_feat)
        features = in_feat
        if in_map.ndim != 1 or in_map.dtype not in INTEGERS or in_map.shape != out_map.shape:
            raise ValueError(
                f"in_map and out_map must be (P,) integers; got {tuple(in_map.shape)} {in_map.dtype} and "
                f"{tuple(out_map.shape)}"
            )
        low, high = (int(end) for end in in_map.aminmax()) if len(in_map) and not in_map.is_cuda else (0, -1)
        if low < 0 or high >= len(features):  # a GPU checks by itself
            raise ValueError(f"in_map must name rows from 0 to {len(features) - 1}; got {low} to {high}")
        return PointGroups(out_map, out_nrows).reduce(features[in_map.long()], "max")


# ---- pruning, union and interpolation


class MinkowskiPruningFunction:
    """Pruning as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        in_feat: torch.Tensor,
        mask: torch.Tensor,
        in_coords_key: CoordinateMapKey,
        out_coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> those where mask (N,) bool is true; sets an output key that is not set."""
        manager = given_manager(coords_manager)
        check_features("in_feat", in_feat, manager.size(in_coords_key))
        check_mask(mask, len(in_feat))
        if out_coords_key is not None and not out_coords_key.is_key_set():
            out_coords_key.set_key(*manager.prune(in_coords_key, mask).get_key())
        return in_feat[mask]


class MinkowskiPruning(MinkowskiModuleBase):
    """The voxels where a mask is true, in their order."""

    def forward(self, input: SparseTensor, mask: torch.Tensor) -> SparseTensor:
        """A `SparseTensor` and mask (N,) bool on its device -> the voxels that stay."""
        check_input(input, None)
        manager = input.coordinate_manager
        kept = manager.prune(input.key, mask)  # which says what is wrong with a mask
        return input.placed(input.F[mask], kept, manager)


class MinkowskiUnionFunction:
    """The union as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        in_coords_keys: list[CoordinateMapKey],
        out_coords_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager,
        *in_feats: torch.Tensor,
    ) -> torch.Tensor:
        """Features (N_i, C) of each key -> their sum over all voxels; sets the output key."""
        if len(in_feats) != len(in_coords_keys) or len(in_feats) < 2:
            raise ValueError(f"a union takes two tensors or more; got {len(in_feats)}, {len(in_coords_keys)} keys")
        for key, features in zip(in_coords_keys, in_feats):
            check_features("in_feats", features, coordinate_manager.size(key), "voxel of its key")
        if len({features.shape[1] for features in in_feats}) > 1:
            raise ValueError(f"in_feats must have as many channels each; got {[tuple(x.shape) for x in in_feats]}")
        maps = coordinate_manager.union_map(in_coords_keys, out_coords_key)
        zeros = in_feats[0].new_zeros(coordinate_manager.size(out_coords_key), in_feats[0].shape[1])
        return reduce(torch.add, [zeros.to(x.dtype).index_copy(0, rows[1], x) for rows, x in zip(maps, in_feats)])


class MinkowskiUnion(MinkowskiModuleBase):
    """The sum of sparse tensors over all their voxels, absent ones counting as 0."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        """Two sparse tensors or more, of one coordinate manager."""
        if len(inputs) < 2 or not all(isinstance(x, SparseTensor) for x in inputs):
            raise ValueError(f"a union takes two SparseTensors or more; got {[type(x).__name__ for x in inputs]}")
        manager = inputs[0].coordinate_manager
        if not all(same(x.coordinate_manager, manager) for x in inputs):
            raise ValueError("the tensors of a union must share one coordinate manager")
        key = CoordinateMapKey(manager.D + 1)
        out = MinkowskiUnionFunction.apply([x.key for x in inputs], key, manager, *(x.F for x in inputs))
        return inputs[0].placed(out, key, manager)


class MinkowskiInterpolationFunction:
    """Interpolation as a function of features and points; differentiable in both."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        tfield: torch.Tensor,
        in_coordinate_map_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features (N, C), points (M, 1+D) -> (features (M, C), voxel rows, point rows, weights)."""
        manager = given_manager(coordinate_manager)
        plan, points = manager.interpolation(in_coordinate_map_key, tfield)
        out = plan.interpolate(input_features, points).to(input_features.dtype)
        found = manager.interpolation_map_weight(in_coordinate_map_key, tfield.detach())
        return out, found[0], found[1], found[2]


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Features at points between the voxels, linearly; absent voxels count as 0."""

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        self.return_kernel_map, self.return_weights = return_kernel_map, return_weights

    def forward(self, input: SparseTensor, tfield: torch.Tensor) -> Any:
        """Points (M, 1+D), the batch first -> features (M, C), and what was asked for beside them."""
        check_input(input, None)
        if not self.return_kernel_map and not self.return_weights:
            return input.features_at_coordinates(tfield)
        apply = MinkowskiInterpolationFunction.apply
        out, in_map, out_map, weights = apply(input.F, tfield, input.key, input.coordinate_manager)
        asked = [(in_map, out_map)] * self.return_kernel_map + [weights] * self.return_weights
        return (out, *asked)


# ---- broadcasts: features of whole batch items, given to each of their voxels


def spread(features_global: torch.Tensor, key: CoordinateMapKey, manager: CoordinateManager) -> torch.Tensor:
    """(B, C) of the batch items -> (N, C) of the voxels of a key."""
    items = manager.find(key).items
    check_features("features_global", features_global)
    if len(features_global) < items.num_voxels:
        raise ValueError(f"a broadcast takes a row for each of {items.num_voxels} batch items; got "
                         f"{tuple(features_global.shape)}: pool globally first")  # fmt: skip
    return items.spread(features_global[: items.num_voxels])


def _combined(features: torch.Tensor, each: torch.Tensor, mode: BroadcastMode) -> torch.Tensor:
    """The sum or the product of the features of voxels and of their items."""
    if each.shape[1] not in (1, features.shape[1]) and features.shape[1] != 1:
        raise ValueError(
            f"voxels have {features.shape[1]} channels and batch items {each.shape[1]}: a broadcast takes as many"
        )
    return features + each if mode is BroadcastMode.ELEMENTWISE_ADDITON else features * each


class MinkowskiBroadcastFunction:
    """A broadcast as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        input_features_global: torch.Tensor,
        operation_type: BroadcastMode,
        in_coords_key: CoordinateMapKey,
        glob_coords_key: CoordinateMapKey,
        coords_manager: CoordinateManager,
    ) -> torch.Tensor:
        """Features (N, C) and (B, C) -> (N, C): their sum or product."""
        check_features("input_features", input_features, coords_manager.size(in_coords_key))
        return _combined(input_features, spread(input_features_global, in_coords_key, coords_manager), operation_type)


class MinkowskiBroadcast(MinkowskiModuleBase):
    """Each voxel takes the features of its batch item. ``dimension`` is accepted, without effect."""

    operation_type: BroadcastMode | None = None

    def __init__(self, dimension: int | None = None) -> None:
        super().__init__()

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        check_input(input, None)
        check_input(input_glob, None)
        each = spread(input_glob.F, input.key, input.coordinate_manager)
        return input.like(self.combine(input.F, each))

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        """What becomes of a voxel's features and its item's."""
        return each if self.operation_type is None else _combined(features, each, self.operation_type)

    def __repr__(self) -> str:
        return type(self).__name__


class MinkowskiBroadcastAddition(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, added."""

    operation_type = BroadcastMode.ELEMENTWISE_ADDITON


class MinkowskiBroadcastMultiplication(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, multiplied."""

    operation_type = BroadcastMode.ELEMENTWISE_MULTIPLICATION


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, side by side."""

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        return torch.cat([features, each], 1)


__all__ = [name for name in list(globals()) if name.startswith("Minkowski")]
