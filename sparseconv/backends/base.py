"""What a backend is, and what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sparseconv.geometry.kernel_map import KernelMap

if TYPE_CHECKING:
    from jaxtyping import Float, Int8, Int32

    from sparseconv.backends.float8 import Float8Rescale
    from sparseconv.backends.integers import Rescale
    from sparseconv.pointwise import Epilogue


#: what all CPU backends compute beside int8
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Request:
    """One convolution as a backend sees it before any tensor exists.

    ``dtype`` is the dtype of features and weights after autocast; ``c_in`` and ``c_out`` are the channels of the
    direction executed, over all ``groups``.
    """

    kernel_map: KernelMap
    device: torch.device
    dtype: torch.dtype
    c_in: int
    c_out: int
    groups: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions on real pairs only: 2 P C_in C_out / G."""
        return 2 * self.kernel_map.num_pairs * self.c_in * self.c_out // self.groups


class Backend(ABC):
    """One strategy to execute a kernel map: three verbs, and a sentence when it cannot.

    The three verbs are linear in each of their tensors and closed under differentiation:
    ``input_grad(g, w, map)`` equals ``forward(g, w with channels exchanged, map.reverse())``, and ``weight_grad`` has
    the other two as its derivatives. Backends see maps and tensors, never autograd. All tensors may have any strides;
    results are contiguous, of the dtype of the features, accumulated in fp32 (fp64 for fp64), and the same bits in
    every run.
    """

    name: ClassVar[str]

    @abstractmethod
    def unsupported(self, request: Request) -> str | None:
        """None if all three verbs can serve this request, else a sentence that says why not and what would help.

        For int8 the one verb is `integers`.
        """

    @abstractmethod
    def forward(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        bias: Float[torch.Tensor, " C_out"] | None = None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """y (N_out, C_out) from x (N_in, C_in), weight (K, C_in/G, C_out) and an optional bias (C_out,)."""

    def forward_fused(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        bias: Float[torch.Tensor, " C_out"] | None,
        residual: Float[torch.Tensor, "N_out C_out"] | None,
        epilogue: Epilogue | None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """epilogue(forward + residual (N_out, C_out)), without a gradient; rounded once, to the dtype of x."""
        if residual is None and epilogue is None:
            return self.forward(x, weight, kernel_map, groups, bias)
        y = self.sums(x, weight, kernel_map, groups, bias)
        if residual is not None:
            y += residual
        return (y if epilogue is None else epilogue.over(y)).to(x.dtype)

    def sums(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        bias: Float[torch.Tensor, " C_out"] | None = None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """What `forward` rounds: y (N_out, C_out) in fp32, or fp64 for fp64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if bias is None else bias.to(wide)
        return self.forward(x.to(wide), weight.to(wide), kernel_map, groups, bias)

    def input_grad(
        self,
        grad_out: Float[torch.Tensor, "N_out C_out"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
    ) -> Float[torch.Tensor, "N_in C_in"]:
        """dL/dx (N_in, C_in) from dL/dy (N_out, C_out) and the weight (K, C_in/G, C_out) as it lies."""
        return self.forward(grad_out, *adjoint_of(weight, kernel_map, groups), groups)

    def input_grad_onto(
        self,
        grad_out: Float[torch.Tensor, "N_out C_out"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        other: Float[torch.Tensor, "N_in C_in"],
    ) -> Float[torch.Tensor, "N_in C_in"]:
        """input_grad + other (N_in, C_in), rounded once, to the dtype of ``grad_out``."""
        sums = self.sums(grad_out, *adjoint_of(weight, kernel_map, groups), groups)
        return sums.add_(other).to(grad_out.dtype)

    @abstractmethod
    def weight_grad(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        grad_out: Float[torch.Tensor, "N_out C_out"],
        kernel_map: KernelMap,
        groups: int,
    ) -> Float[torch.Tensor, "K C_in/G C_out"]:
        """dL/dw (K, C_in/G, C_out) from x (N_in, C_in) and dL/dy (N_out, C_out)."""

    def gradients(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        grad_out: Float[torch.Tensor, "N_out C_out"],
        kernel_map: KernelMap,
        groups: int,
    ) -> tuple[Float[torch.Tensor, "N_in C_in"], Float[torch.Tensor, "K C_in/G C_out"]]:
        """`input_grad` and `weight_grad`; together where a backend reads less so."""
        grad_weight = self.weight_grad(x, grad_out, kernel_map, groups)  # its partial sums then lie where the other
        return self.input_grad(grad_out, weight, kernel_map, groups), grad_weight  # gradient will be

    def integers(
        self,
        x: Int8[torch.Tensor, "N_in C_in"],
        weight: Int8[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        bias: Int32[torch.Tensor, " C_out"] | None = None,
        rescale: Rescale | None = None,
        residual: Int8[torch.Tensor, "N_out C_out"] | None = None,
    ) -> Int32[torch.Tensor, "N_out C_out"] | Int8[torch.Tensor, "N_out C_out"]:
        """Sums (N_out, C_out) int32 of int8 x and weight and an int32 bias, or the int8 that ``rescale`` makes of them.

        See `sparseconv.backends.integers`: every backend returns the same bytes.
        """
        raise NotImplementedError(f"backend {self.name!r} has no integer convolution")

    def float8(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"],
        kernel_map: KernelMap,
        groups: int,
        bias: Float[torch.Tensor, " C_out"],
        rescale: Float8Rescale | None = None,
        residual: Float[torch.Tensor, "N_out C_out"] | None = None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """fp32 sums (N_out, C_out) of e4m3 x and weight and an fp32 bias, or the e4m3 that ``rescale`` makes of them.

        See `sparseconv.backends.float8`. Here on fp32, which holds all that e4m3 does.
        """
        sums = self.forward(x.float(), weight.float(), kernel_map, groups, bias)
        return sums if rescale is None else rescale.apply(sums, residual)

    @abstractmethod
    def workspace_bytes(self, request: Request) -> int:
        """The most memory that one verb, or both gradients together, allocates besides its result, in bytes."""

    def steady_rows(self, request: Request) -> float:
        """The number of output rows from which on each row is summed in one order, however many there are.

        0: for any number. Infinite: the number of pairs counts as well.
        """
        return 0.0

    def describe(self, request: Request) -> list[str]:
        """What this backend would do for a request that it can serve, in lines to read: tiles, waste, its choice."""
        return []


def swap_channels(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """(K, a/G, b) -> (K, b/G, a): the channels of each group exchanged; of one group, a view."""
    k, a, b = weight.shape
    return weight.reshape(k, a, groups, b // groups).permute(0, 3, 2, 1).reshape(k, b // groups, a * groups)


def adjoint_of(weight: torch.Tensor, kernel_map: KernelMap, groups: int) -> tuple[torch.Tensor, KernelMap]:
    """The weight and the map whose convolution is the adjoint of this one's."""
    weight = swap_channels(weight, groups)
    if kernel_map.mirror is None:
        return weight, kernel_map.reverse()
    return weight[list(kernel_map.mirror)], kernel_map  # a tap's edges reversed are those of its mirror


def with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its rows are not contiguous runs of channels."""
    lies = x.is_contiguous() or (x.shape[1] <= x.stride(0) and (x.stride(1) == 1 or x.shape[1] <= 1))
    return x if lies else x.contiguous()


def not_on_cpu(request: Request) -> str | None:
    """None where a request is for the CPU and of a dtype that it computes, else a sentence that says why not."""
    if request.device.type != "cpu":
        return f"it runs on the CPU and the plan is on {request.device}"
    if request.dtype not in (*FLOATING, torch.int8):
        return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64, or int8 without a gradient"
    return None
