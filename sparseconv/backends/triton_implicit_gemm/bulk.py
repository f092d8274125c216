"""Programs whose weight the copy engine brings to shared memory, a whole tile at a time: they take a descriptor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sparseconv.gpu.program import Program


class BulkProgram(Program):
    """A `Program` of a Gluon kernel whose second argument describes a matrix.

    It is called as any program is, with the matrix or its address. ``shape`` is the matrix's (rows, columns),
    ``stride`` the numbers from one row to the next, ``block`` the tile that one copy brings.
    """

    def __init__(
        self,
        kernel: Any,
        types: Sequence[Any],
        constants: dict[str, Any],
        warps: int,
        stages: int,
        shape: tuple[int, int],
        stride: int,
        block: tuple[int, int],
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # Triton is loaded where it is used

        from sparseconv.backends.triton_implicit_gemm.gluon_kernels import shared_layout

        layout = shared_layout(block[1], 16 // types[1].itemsize)

        @lru_cache(maxsize=64)  # an optimizer leaves a weight where it is
        def describe(address: int) -> Any:
            return TensorDescriptor(_Place(address, types[1]), list(shape), [stride, 1], list(block), layout)

        self._describe = describe
        super().__init__(kernel, (types[0], describe(0), *types[2:]), constants, warps, stages)

    def start(self, device_index: int) -> Callable[[int, int, tuple], None]:
        """What launches it on a device: called with both sides of the grid and the arguments before the constants."""
        start, describe = super().start(device_index), self._describe

        def described(x: int, y: int, arguments: tuple) -> None:
            start(x, y, (arguments[0], describe(arguments[1]), *arguments[2:]))

        return described

    def through_triton(self, grid: int, arguments: tuple[Any, ...]) -> None:
        """Launch as Triton does, which looks at every argument."""
        super().through_triton(grid, (arguments[0], self._describe(arguments[1].data_ptr()), *arguments[2:]))


class _Place(NamedTuple):
    """What a descriptor asks of the tensor that it describes."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
