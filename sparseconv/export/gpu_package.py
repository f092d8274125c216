"""From a network to a package that a C++ program runs on a GPU, without Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.export.program import checked, grid_of
from sparseconv.export.recorder import Recorder
from sparseconv.export.sequence import Memory, Writer
from sparseconv.files import check_place, written_whole
from sparseconv.geometry.fixed_grid import ROWS, FixedGrid
from sparseconv.geometry.fixed_grid_io import FAULTS, fault_of, put_scene
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.grid_cache import remember
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu import graphs
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree

if TYPE_CHECKING:
    from jaxtyping import Integer, Shaped

#: the number of this form of a package
FORM = 1
#: rows of a result that are those of the scene, and of one that no scene changes
VOXELS, FIXED = -1, -2


def package_for_gpu(
    net: torch.nn.Module,
    inputs: Sequence[Integer[torch.Tensor, "N 1+D"] | Shaped[torch.Tensor, "N C"]],
    path: str | Path,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
    batch_size: int | None = None,
    make: Callable[[Integer[torch.Tensor, "N 1+D"], Shaped[torch.Tensor, "N C"]], Any] | None = None,
) -> Path:
    """Write a network's inference on a GPU as a package that a C++ program runs without Python.

    The inference is captured as `sparseconv.nn.capture` does it, over arrays of a fixed number of rows. The package
    holds the kernels in the machine code of this kind of GPU, the weights as they are now, and all steps in order. The
    C++ class `sparseconv::GpuNetwork`, in the folder `CPP`, makes a CUDA graph of them. Its results have the bits of
    those of `sparseconv.nn.capture`.

    Args:
        net: takes what ``make`` returns, by default a `SparseTensor`; in evaluation mode, on a GPU.
        inputs: an example on the same GPU, coords (N, 1+D) int32 and features (N, C), N of at least two.
        path: the file to write, whose name ends in ``.pt``.
        room: rows of every grid over those that it has for the example, at least 1.
        max_voxels: voxels of the largest scene; default: those of the example times ``room``. Rounded up to 256.
        extent: the box that voxels lie in; default: the example's, grown by an eighth on each side.
        batch_size: of every scene; default: that of the example.
        make: (coords, features) -> the input of ``net``, as `export` takes it, for networks of
            `sparseconv.interop.spconv`'s tensors. The very tensor of coords must reach them.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: a network or an example that is not on a GPU, arguments that do not fit, a network in
            training, one that does what no package holds, or one whose result is changed by the rows that are no
            voxels. Nothing is written then.
        RuntimeError: the example does not fit into ``extent``, or the network does what no graph can hold.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3).cuda(), voxel_size=0.1)  # doctest: +SKIP
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval().cuda()  # doctest: +SKIP
    >>> package_for_gpu(net, (grid.coords, torch.randn(len(grid), 4).cuda()), "unet.pt")  # doctest: +SKIP
    PosixPath('unet.pt')
    """
    path = Path(path)
    if path.suffix != ".pt":
        raise ValueError(f"the name of a package for a GPU must end in .pt; got {path.name!r}")
    check_place(path)
    coords, features = checked(net, inputs)
    if coords.device.type != "cuda" or coords.device != features.device or torch.version.hip is not None:
        raise ValueError(
            f"a package for a GPU is made on an NVIDIA GPU; got coords on {coords.device} and features on "
            f"{features.device}: move the network and the example there, or see sparseconv.export.package for a CPU"
        )
    if coords.dtype != torch.int32:
        raise ValueError(f"coords must be int32; got {coords.dtype}")
    voxels = len(coords)
    most = math.ceil(room * voxels) if max_voxels is None else max_voxels
    if room < 1 or most < voxels:
        raise ValueError(
            f"room must be at least 1 and max_voxels at least the example's {voxels}; got {room} and {max_voxels}"
        )
    most = -(-most // ROWS) * ROWS
    with torch.cuda.device(coords.device), torch.no_grad():
        like = VoxelGrid(coords, batch_size)
        run = _Run(net, like, features, most, max(room, most / voxels), extent, make)
        made = run.package()
    with written_whole(path) as part:
        torch.save(made, part)
    return path


class _Run:
    """A network over the arrays of a scene of fixed size."""

    def __init__(
        self,
        net: torch.nn.Module,
        like: VoxelGrid,
        features: torch.Tensor,
        most: int,
        room: float,
        extent: Any,
        make: Callable[..., Any] | None = None,
    ) -> None:
        self._net, self._like, self._room, self._extent, self._make = net, like, room, extent, make
        self._example = features
        device = features.device
        self._coords = torch.full((most, like.rank + 1), -1, dtype=torch.int32, device=device)
        self._features = features.new_zeros(most, features.shape[1])
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        #: the rows of each result: `VOXELS`, `FIXED`, or a number of the status
        self._rows: list[int] = []
        kind = device.type
        self._casts = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def _load(self, coords: torch.Tensor, features: torch.Tensor) -> None:
        put_scene(coords, self._coords, self._count, len(self._coords))
        self._features.zero_()
        self._features[: len(features)] = features

    def _called(self, grid: VoxelGrid, coords: torch.Tensor, features: torch.Tensor) -> list[Any]:
        """What the network returns for features on a grid: sparse tensors, tensors, and all else."""
        remember(coords, grid)  # whoever makes a sparse tensor of these coords makes it on this grid
        x = SparseTensor(grid, features) if self._make is None else self._make(coords, features)
        with torch.autocast(*self._casts, cache_enabled=False):
            results = self._net(x)
        return list(pytree.tree_leaves(results, is_leaf=lambda leaf: grid_of(leaf) is not None))

    def _body(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What did not fit and the voxels of the grids of results, (R,) int32, then the results."""
        grid = FixedGrid(self._coords, self._count, self._like, extent=self._extent, room=self._room)
        self._box = grid.extent
        status, results, numbers = [grid.fault], [], {id(grid.count): VOXELS}
        self._rows = []

        def add(tensor: torch.Tensor, count: torch.Tensor | None) -> None:
            if tensor.device != self._example.device:
                raise ValueError(f"the network returns a tensor on {tensor.device}: return what is on the GPU")
            if count is not None and id(count) not in numbers:
                numbers[id(count)] = len(status)
                status.append(count)
            self._rows.append(FIXED if count is None else numbers[id(count)])
            results.append(tensor)

        for leaf in self._called(grid, self._coords, self._features):
            own = grid_of(leaf)
            if own is not None:
                add(leaf.features, own.count)
                if own is not grid:
                    add(own.coords, own.count)
            elif isinstance(leaf, torch.Tensor):  # no two grids of a scene have as many rows
                add(leaf, grid.family.get(len(leaf)) if leaf.ndim else None)
        return torch.cat(status), results

    def package(self) -> dict[str, Any]:
        """What the file holds."""
        self._load(self._like.coords, self._example)
        status, results = self._body()
        self._check(status, results)
        recorder, device = Recorder(), self._example.device
        graph, (status, results) = graphs.graph_of(self._body, device, recorder)
        self._load(self._like.coords[:0], self._example[:0])  # no scene of ours lies in the package
        graph.replay()
        torch.cuda.synchronize(device)
        memory = Memory(graph.pool(), torch.cuda.memory_snapshot())
        writer = Writer(memory)
        made = {
            "sparseconv_gpu_package": FORM,
            "torch": str(torch.__version__),
            "gpu": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "steps": writer.steps(recorder),
            "streams": recorder.priorities,
            "events": recorder.events,
            "coords": writer.tensor(self._coords, "the scene"),
            "features": writer.tensor(self._features, "the scene"),
            "count": writer.tensor(self._count, "the scene"),
            "status": writer.tensor(status, "the scene"),
            "results": [(rows, *writer.tensor(t, "the scene")) for rows, t in zip(self._rows, results)],
            "faults": list(FAULTS.items()),
            "batch_size": self._like.batch_size,
            "extent": str(self._box),
        }
        made |= {"kernels": writer.kernels, "kinds": writer.kinds, "workspaces": memory.workspaces}
        made["constants"] = memory.constants(device)
        return made

    def _check(self, status: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Raise where the example does not fit, or the rows that are no voxels change a result."""
        from sparseconv.ops.comparing import largest_gap  # loaded where it is used

        fault, *counts = status.tolist()
        if fault:
            raise RuntimeError(
                f"the example does not fit: {fault_of(fault)}. Give more room (now {self._room:g}) or a larger extent "
                f"(now {self._box})"
            )
        voxels = len(self._like)
        sizes = [None if n == FIXED else voxels if n == VOXELS else counts[n - 1] for n in self._rows]
        mine = [t if n is None else t[:n] for t, n in zip(results, sizes)]
        alone: list[torch.Tensor] = []
        for leaf in self._called(self._like, self._like.coords, self._example):
            own = grid_of(leaf)
            if own is not None:
                alone += [leaf.features] if own is self._like else [leaf.features, own.coords]
            elif isinstance(leaf, torch.Tensor):
                alone.append(leaf)
        off = largest_gap(mine, alone)
        if off:
            raise ValueError(
                f"the rows that are no voxels change the network's result, by {off:.2g} of its rms: every module must "
                "work row by row, or be one of this library's, which leave those rows out"
            )
