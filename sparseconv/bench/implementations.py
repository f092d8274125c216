"""Who is measured: this library, by its own choice of a backend and by each backend's name.

Every one is a `Convolution`: submanifold, an odd cube of taps (3x3x3 for most), C channels in and out, no bias, over
given coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparseconv.bench.timing import DTYPES

if TYPE_CHECKING:
    from sparseconv.geometry.grid import VoxelGrid


class Convolution(ABC):
    """One implementation at work on one case: coords (N, 4) int32, channels, a dtype's name (`timing.DTYPES`), an odd
    edge of the kernel."""

    name: ClassVar[str]
    #: modules without which it cannot run
    needs: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "tf32", "fp32")
    #: edges of the kernels that its adapter knows; None: any
    kernels: ClassVar[tuple[int, ...] | None] = (3,)
    #: whether some of the map is only made by the first step, so that `prepare` alone does not time it
    lazy: bool = False
    #: whether the two gradients can be asked for apart
    apart: ClassVar[bool] = True
    #: whether its CPU results are the same in every run only with one thread: then they are judged with one
    unsteady: ClassVar[bool] = False
    #: times the judge's limits in half types that it may use up, where it rounds partial sums to the half type as well
    slack: ClassVar[float] = 1.0
    weight: torch.Tensor

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        self.coords, self.channels, self.dtype, self.kernel = coords, channels, DTYPES[dtype], kernel

    @classmethod
    def missing(cls, device: str, dtype: str, kernel: int = 3) -> str | None:
        """Why it cannot serve a device, dtype and kernel here, or None."""
        if device not in cls.devices:
            return f"has no {device} kernels"
        if dtype not in cls.dtypes:
            return f"does not compute in {dtype}"
        if cls.kernels is not None and kernel not in cls.kernels:
            return f"is measured at kernel {', '.join(map(str, cls.kernels))} only"
        for module in cls.needs:
            try:
                import_module(module)
            except Exception as error:  # a peer may fail in any way
                return f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    @abstractmethod
    def prepare(self) -> None:
        """From the coordinates to everything that a training step needs, anew."""

    def learn(self) -> None:
        """Called after a step whose choices were made before: from now on `prepare` makes all that it used."""
        return

    def settle(self) -> None:
        """Called before maps are timed: let what is compiled meanwhile come to an end."""
        return

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y (N, C) from x (N, C) in the rows of the coordinates; differentiable in x and in ``weight``."""

    @abstractmethod
    def set_weight(self, weight: torch.Tensor) -> None:
        """Take over a weight (K, C_in, C_out), the last axis fastest."""

    @abstractmethod
    def weight_grad(self) -> torch.Tensor:
        """The gradient of ``weight`` as (K, C_in, C_out)."""

    def details(self) -> dict[str, Any]:
        """What it says about itself: backend, waste."""
        return {}


class Sparseconv(Convolution):
    """This library, its own choice of backend."""

    name = "sparseconv"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "tf32", "fp32", "fp64")
    kernels = None
    backend: ClassVar[str] = "auto"
    lazy = True

    def __init__(self, coords: torch.Tensor, channels: int, dtype: str, kernel: int = 3) -> None:
        import sparseconv as sc  # here, and not where maps are timed: to look a module up takes a microsecond

        super().__init__(coords, channels, dtype, kernel)
        self._grid, self._plan = sc.VoxelGrid, sc.ConvolutionPlan

    def prepare(self) -> None:
        self.prepare_on(self._grid(self.coords))

    def prepare_on(self, grid: VoxelGrid) -> None:
        """`prepare` over a grid of some kind."""
        self.plan = plan = self._plan(grid, self.kernel, backend=self.backend)
        if self._used:
            edges = plan.kernel_map
            for make, *asked in self._used.values():
                make(edges, *asked)
            edges.half_pairs if edges.is_halved else edges.in_rows  # noqa: B018 (what the weight gradient reads)

    #: what a step makes of a map, once a step has chosen: schedules by tile size, direction, groups and order, and jobs
    #: by their number; what makes them, and of what
    _used: Mapping[str, tuple[Any, ...]] = MappingProxyType({})

    def learn(self) -> None:
        from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of

        lists = self.plan.kernel_map.work_lists
        self._used = {" ".join(map(str, ("schedule", *form))): (schedule_of, *form) for form in lists.schedules}
        self._used |= {f"jobs {count}": (jobs_of, count) for count in lists.jobs}
        self.lazy = not self._used

    def settle(self) -> None:
        self.prepare()  # the first map that knows what maps are asked for

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plan.execute(x, self.weight)

    def set_weight(self, weight: torch.Tensor) -> None:
        self.weight = weight.to(self.dtype).clone().requires_grad_()

    def weight_grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return self.weight.grad

    def details(self) -> dict[str, Any]:
        from sparseconv.backends.registry import choose

        request = self.plan.request(self.channels, self.channels, self.dtype)
        backend = choose(request, self.backend)
        found: dict[str, Any] = {"backend": backend.name, "map": list(self._used)}
        report = getattr(backend, "explain", None)
        if report is not None:
            said = report(request)
            found["waste"] = said.get("waste")
            for verb in ("forward", "input_grad", "weight_grad"):
                if isinstance(said.get(verb), dict):
                    found[f"{verb}_config"] = str(said[verb].get("config"))
        return found


def named(
    asked: str, kinds: tuple[str, ...], modules: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> type[Sparseconv]:
    """This library held to one backend on the devices that it serves; ``modules``: without which it cannot run."""

    class Named(Sparseconv):
        name = f"sparseconv:{asked}"
        backend = asked
        devices = kinds
        needs = modules
        dtypes = tuple(dtype for dtype in Sparseconv.dtypes if dtype not in without)

    return Named


Implementations = Mapping[str, type[Convolution]]


def by_name(kinds: Iterable[type[Convolution]]) -> Implementations:
    """Implementations under their names."""
    return MappingProxyType({kind.name: kind for kind in kinds})


BACKENDS = (
    named("triton_implicit_gemm", ("cuda",), ("triton",), without=("fp64",)),
    named("cupy_gather_scatter", ("cuda",), ("cupy",)),
    named("llvm_implicit_gemm", ("cpu",), ("llvmlite",)),
    named("numpy_gather_scatter", ("cpu",)),
    named("torch_gather_scatter", ("cuda", "cpu")),
)
#: ours first
IMPLEMENTATIONS = by_name((Sparseconv, *BACKENDS))
