"""Adapters to other sparse convolution libraries and to dense convolution, each by its own public functions.

Coordinates are not reordered on the way; where a library insists on an order of its own, its adapter carries features
there and back within the timed call, as its user would.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any, ClassVar

import torch

from sparseconv.bench.implementations import Convolution


def boxed(weight: torch.Tensor) -> torch.Tensor:
    """(K, C_in, C_out) -> torch's (C_out, C_in, k, k, k)."""
    side = round(len(weight) ** (1 / 3))
    return weight.view(side, side, side, *weight.shape[1:]).permute(4, 3, 0, 1, 2).contiguous()


def unboxed(weight: torch.Tensor) -> torch.Tensor:
    """torch's (C_out, C_in, k, k, k) -> (K, C_in, C_out)."""
    return weight.permute(2, 3, 4, 1, 0).reshape(-1, weight.shape[1], weight.shape[0])


def by_tap(weight: torch.Tensor) -> torch.Tensor:
    """(C_out, k, k, k, C_in) -> (K, C_in, C_out)."""
    return weight.reshape(weight.shape[0], -1, weight.shape[-1]).permute(1, 2, 0)


def by_channel(weight: torch.Tensor) -> torch.Tensor:
    """(K, C_in, C_out) -> (C_out, k, k, k, C_in)."""
    side = round(len(weight) ** (1 / 3))
    return weight.permute(2, 0, 1).reshape(weight.shape[2], side, side, side, weight.shape[1]).contiguous()


def load_spconv() -> Any:
    """``spconv.pytorch``. Where torch has no CUDA its wheel still asks for a stream, so the question is answered."""
    pytorch = import_module("spconv.pytorch")
    if not torch.cuda.is_available():
        for name in ("cppcore", "ops", "functional"):
            module = import_module(f"spconv.pytorch.{name}")
            if hasattr(module, "get_current_stream"):
                module.get_current_stream = lambda: 0  # type: ignore[attr-defined]
    return pytorch


class Spconv(Convolution):
    """spconv, or its wheel for a CUDA version."""

    name = "spconv"
    needs = ("spconv.pytorch",)
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    dtypes = ("fp16", "tf32", "fp32")
    kernels = (3, 5, 7)  # a layer of one tap is another one there
    apart = False  # its backward finds both gradients in any case
    unsteady = True
    slack = 4.0

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        super().__init__(coords, channels, dtype, kernel)
        self.library = self._load()
        self._switch_tf32(dtype == "tf32")
        self._forget_choices()
        self.layer = self.library.SubMConv3d(channels, channels, kernel, bias=False, indice_key="map", fp32_accum=True)
        self.layer = self.layer.to(device=coords.device, dtype=self.dtype)
        self.shape = [int(n) for n in coords[:, 1:].amax(0) + 1]
        self.known: dict[str, Any] = {}

    def _load(self) -> Any:
        return load_spconv()

    def _switch_tf32(self, allowed: bool) -> None:
        constants = import_module("spconv.constants")
        if hasattr(constants, "SPCONV_ALLOW_TF32"):
            constants.SPCONV_ALLOW_TF32 = allowed  # type: ignore[attr-defined]

    def _forget_choices(self) -> None:
        """It chooses kernels by channels and keeps them for every number of rows: here each case has its own choice."""
        ops = self.library.ops
        if getattr(ops, "CONV_CPP", None) is not None:
            algo = import_module("spconv.algo")
            ops.CONV_CPP = algo.ConvTunerSimple(
                [algo.algocore.get_conv_algo_desp_from_param(known) for known in algo.ALL_IMPGEMM_PARAMS]
            )

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.layer.weight

    def prepare(self) -> None:
        ops, layer, tensor = self.library.ops, self.layer, self._tensor(self.coords.new_zeros(len(self.coords), 0))
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding)
        kinds = import_module(f"{self.needs[0]}.core")
        if layer.algo == self.library.ops.ConvAlgo.Native:
            out, pairs, counts = ops.get_indice_pairs(
                self.coords, 1, self.shape, layer.algo, *window, layer.subm, layer.transposed
            )
            data = kinds.IndiceData(
                out,
                self.coords,
                pairs,
                counts,
                self.shape,
                self.shape,
                True,
                layer.algo,
                layer.kernel_size,
                layer.stride,
                layer.dilation,
                layer.padding,
            )
        else:
            found = ops.get_indice_pairs_implicit_gemm(
                self.coords,
                1,
                self.shape,
                layer.algo,
                *window,
                layer.subm,
                layer.transposed,
                is_train=True,
                alloc=getattr(tensor, "thrust_allocator", None),
            )
            out, _, pairs, back, masks_f, masks_b, order_f, order_b, masks = found[:9]
            data = kinds.ImplicitGemmIndiceData(
                out,
                self.coords,
                pairs,
                back,
                pair_mask_fwd_splits=masks_f,
                pair_mask_bwd_splits=masks_b,
                mask_argsort_fwd_splits=order_f,
                mask_argsort_bwd_splits=order_b,
                masks=masks,
                is_subm=True,
                spatial_shape=self.shape,
                out_spatial_shape=self.shape,
                algo=layer.algo,
                ksize=layer.kernel_size,
                stride=layer.stride,
                padding=layer.padding,
                dilation=layer.dilation,
            )
        self.known = {"map": data}

    def _tensor(self, x: torch.Tensor) -> Any:
        return self.library.SparseConvTensor(x, self.coords, self.shape, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor = self._tensor(x)
        tensor.indice_dict = self.known
        return self.layer(tensor).features

    def set_weight(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.layer.weight.copy_(by_channel(weight))

    def weight_grad(self) -> torch.Tensor:
        return by_tap(self.layer.weight.grad)


class SpconvTriton(Spconv):
    """spconv-triton."""

    name = "spconv-triton"
    needs = ("spconv_triton.pytorch",)
    devices = ("cuda",)

    def _load(self) -> Any:
        return import_module("spconv_triton.pytorch")

    def _forget_choices(self) -> None:
        return

    def _switch_tf32(self, allowed: bool) -> None:
        constants = import_module("spconv_triton.constants")
        if hasattr(constants, "SPCONV_ALLOW_TF32"):
            constants.SPCONV_ALLOW_TF32 = allowed  # type: ignore[attr-defined]


class FlexGemm(Convolution):
    """FlexGEMM by one of its algorithms."""

    name = "FlexGEMM"
    slack = 4.0
    needs = ("flex_gemm.ops.spconv",)
    dtypes = ("fp16", "fp32", "tf32")
    algorithm: ClassVar[str] = "MASKED_IMPLICIT_GEMM"
    lazy = True  # tap lists by tile are made when a kernel first asks for them

    def prepare(self) -> None:
        self.ops = import_module("flex_gemm.ops.spconv")
        self.ops.set_algorithm(getattr(self.ops.Algorithm, self.algorithm))
        self.shape = torch.Size([1, self.channels, *(int(n) for n in self.coords[:, 1:].amax(0) + 1)])
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.cache = self.ops.sparse_submanifold_conv3d(x, self.coords, self.shape, self.cache, self.weight)
        return y

    def set_weight(self, weight: torch.Tensor) -> None:
        self.weight = by_channel(weight.to(self.dtype)).requires_grad_()

    def weight_grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return by_tap(self.weight.grad)


class FlexGemmSplitK(FlexGemm):
    """FlexGEMM with split-K."""

    name = "FlexGEMM split-K"
    algorithm = "MASKED_IMPLICIT_GEMM_SPLITK"


class MinkowskiEngine(Convolution):
    """MinkowskiEngine 0.5; taps with the first axis fastest."""

    name = "MinkowskiEngine"
    slack = 4.0
    needs = ("MinkowskiEngine",)
    devices = ("cuda", "cpu")
    dtypes = ("fp32",)
    lazy = True

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        super().__init__(coords, channels, dtype, kernel)
        self.library = import_module("MinkowskiEngine")
        self.layer = self.library.MinkowskiConvolution(channels, channels, 3, dimension=3).to(coords.device)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.layer.kernel

    def prepare(self) -> None:
        self.manager = self.library.CoordinateManager(D=3)
        self.key, (_, self.inverse) = self.manager.insert_and_map(self.coords, [1, 1, 1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor = self.library.SparseTensor(x, coordinate_map_key=self.key, coordinate_manager=self.manager)
        return self.layer(tensor).F

    def set_weight(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.layer.kernel.copy_(_axes_reversed(weight))

    def weight_grad(self) -> torch.Tensor:
        return _axes_reversed(self.layer.kernel.grad)


class TorchSparse(Convolution):
    """torchsparse 2.1; taps with the first axis fastest."""

    name = "torchsparse"
    slack = 4.0
    needs = ("torchsparse", "torchsparse.nn")
    dtypes = ("fp16", "fp32")
    lazy = True

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        super().__init__(coords, channels, dtype, kernel)
        self.library = import_module("torchsparse")
        self.layer = import_module("torchsparse.nn").Conv3d(channels, channels, 3).to(coords.device, self.dtype)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.layer.kernel

    def prepare(self) -> None:
        self.known: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor = self.library.SparseTensor(x, self.coords)
        if self.known is not None:
            tensor._caches = self.known
        y = self.layer(tensor)
        self.known = tensor._caches
        return y.feats

    def set_weight(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.layer.kernel.copy_(_axes_reversed(weight))

    def weight_grad(self) -> torch.Tensor:
        return _axes_reversed(self.layer.kernel.grad)


class WarpConvNet(Convolution):
    """WarpConvNet."""

    name = "WarpConvNet"
    slack = 4.0
    needs = ("warpconvnet.geometry.types.voxels", "warpconvnet.nn.modules.sparse_conv")
    dtypes = ("fp16", "bf16", "fp32")
    lazy = True

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        super().__init__(coords, channels, dtype, kernel)
        self.voxels = import_module(self.needs[0]).Voxels
        self.layer = import_module(self.needs[1]).SparseConv3d(channels, channels, kernel_size=3, bias=False)
        self.layer = self.layer.to(coords.device, self.dtype)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.layer.weight

    def prepare(self) -> None:
        offsets = torch.tensor([0, len(self.coords)])
        empty = torch.empty(len(self.coords), self.channels, dtype=self.dtype, device=self.coords.device)
        self.scene = self.voxels(self.coords[:, 1:].contiguous(), empty, offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.scene.replace(batched_features=x)).feature_tensor

    def set_weight(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.layer.weight.copy_(weight.view(self.layer.weight.shape))

    def weight_grad(self) -> torch.Tensor:
        return self.layer.weight.grad.view(27, self.channels, self.channels)


class Fvdb(Convolution):
    """fVDB; its grids have an order of rows of their own."""

    name = "fVDB"
    slack = 4.0
    needs = ("fvdb",)
    devices = ("cuda", "cpu")
    lazy = True

    def prepare(self) -> None:
        fvdb = import_module("fvdb")
        points = self.coords[:, 1:].contiguous()
        self.grid = fvdb.GridBatch.from_ijk(fvdb.JaggedTensor(points))
        self.plan = fvdb.ConvolutionPlan.from_grid_batch(3, 1, self.grid, self.grid)
        self.rows = self.grid.ijk_to_index(fvdb.JaggedTensor(points)).jdata.long()
        self.there = torch.empty_like(self.rows)
        self.there[self.rows] = torch.arange(len(points), device=points.device)
        self.wrap = self.grid.jagged_like

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plan.execute(self.wrap(x[self.there]), self.weight).jdata[self.rows]

    def set_weight(self, weight: torch.Tensor) -> None:
        self.weight = boxed(weight.to(self.dtype)).requires_grad_()

    def weight_grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return unboxed(self.weight.grad)


class Dense(Convolution):
    """`torch.nn.functional.conv3d` over the bounding box, read at the voxels: what sparsity saves."""

    name = "dense conv3d"
    devices = ("cuda", "cpu")
    kernels = None
    #: bytes that one dense volume of features may take, by device
    most: ClassVar[dict[str, int]] = {"cuda": 8 << 30, "cpu": 1 << 29}

    def prepare(self) -> None:
        c = self.coords[:, 1:].long()
        low = c.amin(0)
        self.shape = [int(n) for n in (c.amax(0) - low + 1)]
        volume = self.shape[0] * self.shape[1] * self.shape[2]
        needed = volume * self.channels * self.dtype.itemsize
        if needed > self.most[self.coords.device.type]:
            raise MemoryError(f"the bounding box {self.shape} would take {needed / 2**30:.1f} GiB of features")
        c = c - low
        self.site = (c[:, 0] * self.shape[1] + c[:, 1]) * self.shape[2] + c[:, 2]
        self.volume = volume

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = x.new_zeros(self.volume, self.channels).index_copy(0, self.site, x)
        dense = dense.view(1, *self.shape, self.channels).permute(0, 4, 1, 2, 3)
        y = torch.nn.functional.conv3d(dense, self.weight, padding=self.kernel // 2)
        return y.permute(0, 2, 3, 4, 1).reshape(self.volume, self.channels)[self.site]

    def set_weight(self, weight: torch.Tensor) -> None:
        self.weight = boxed(weight.to(self.dtype)).requires_grad_()

    def weight_grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return unboxed(self.weight.grad)


class Dictionary(Convolution):
    """What one writes without a library: rows by voxel in a dictionary, and three operations of PyTorch a tap."""

    name = "dictionary"
    devices = ("cpu",)
    kernels = None

    def prepare(self) -> None:
        voxels = [tuple(voxel) for voxel in self.coords.tolist()]
        rows = {voxel: row for row, voxel in enumerate(voxels)}
        half = self.kernel // 2
        self.edges = []
        for tap in product(range(-half, half + 1), repeat=3):
            seen = [rows.get((b, x + tap[0], y + tap[1], z + tap[2])) for b, x, y, z in voxels]
            pairs = [(row, out) for out, row in enumerate(seen) if row is not None]
            self.edges.append(torch.tensor(pairs, device=self.coords.device).reshape(-1, 2).t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(len(x), self.channels)
        for (rows, outs), weight in zip(self.edges, self.weight):
            y.index_add_(0, outs, x[rows] @ weight)
        return y

    def set_weight(self, weight: torch.Tensor) -> None:
        self.weight = weight.to(self.dtype).clone().requires_grad_()

    def weight_grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return self.weight.grad


def _axes_reversed(weight: torch.Tensor) -> torch.Tensor:
    """(27, C, C) with the taps numbered by the first axis fastest, from the last axis fastest; and back."""
    return weight.view(3, 3, 3, *weight.shape[1:]).permute(2, 1, 0, 3, 4).reshape(weight.shape)


PEERS: tuple[type[Convolution], ...] = (
    Spconv,
    SpconvTriton,
    FlexGemm,
    FlexGemmSplitK,
    MinkowskiEngine,
    TorchSparse,
    WarpConvNet,
    Fvdb,
)
