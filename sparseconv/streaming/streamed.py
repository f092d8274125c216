"""A network over a scene that does not fit into the device's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparseconv.checks import as_device, check_count, check_kind, described
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.streaming.backward import Streamed, parameters_of
from sparseconv.streaming.blocks import piece_of
from sparseconv.streaming.digests import digest
from sparseconv.streaming.phases import GRID, Program
from sparseconv.streaming.planning import PIECE
from sparseconv.streaming.ranks import Ranks
from sparseconv.streaming.run import Run
from sparseconv.streaming.scene import Scene, as_rows
from sparseconv.streaming.store import Part, Store
from sparseconv.streaming.work import Job, Result
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree
from sparseconv.trace.samples import leaves_of, number_of_leaf, recorded

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

#: bytes up to which a whole scene is compared with that of the run that goes on
WHOLE = 2**26
#: is told of each block: blocks done, blocks in all
Told = Callable[[int, int], None]


def stream(
    net: torch.nn.Module,
    x: Any,
    budget_bytes: int,
    *,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    resume: str | PathLike[str] | None = None,
    out: Any = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    gather: bool = True,
) -> Any:
    """What ``net(x)`` is, of a scene larger than the device's memory: block by block, each with its surroundings.

    A block goes through the network together with the voxels that its results look at. How far that is, the index
    projections of all layers say. So each row is what it is in the whole, to the bit but for what the guide on
    streaming names.

    Args:
        net: a network of sparse tensors.
        x: a `SparseTensor`, usually in host memory, or a pair (coords (N, 1+D), features (N, C)) of tensors or numpy
            arrays, which may be mapped files.
        budget_bytes: memory on the device that blocks may take, in addition to the network's own.
        batch_size: of a pair; default: the largest item present + 1.
        device: where the network is; default: that of its parameters.
        progress: called as progress(done, total) after each block; True draws a bar, by the package rich (rank 0 does).
        resume: a folder that keeps finished blocks; a run that was interrupted goes on from them. Results on the
            voxels of x are files in it.
        out: a tensor or an array, such as a mapped file, that takes the rows of the network's one result, which lies on
            the voxels of x.
        group: processes that share the work, each on its own device; all call this with the same arguments. They meet
            in files: ``resume`` is a folder that all of them see, by default one of rank 0's that goes with the run,
            and ``out`` one mapped file.
        gather: of a group, whether each process gets the whole result. False: each gets what it computed alone, in
            memory of its own, for which no process waits. For inference without ``out`` and ``resume``.

    Returns:
        What the network returns, in host memory. A `SparseTensor` on the voxels of x keeps their order. For a pair, a
        sparse tensor becomes its features, or (features, coords) where it lives on other voxels. With ``gather=False``
        a result on the voxels of x is a `streaming.Part`: (rows, features) of this process; results on other voxels
        are those of its blocks, and tensors over the whole scene are whole.

    Raises:
        ImportError: ``progress=True`` without rich.
        ValueError: a network that does something which a block cannot know, named with its place, before anything is
            run; ranks that disagree in network, scene or budget; or a budget that is too small for one block, with
            the least that is enough.
        RuntimeError: another rank failed, with its words.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(400, 3), voxel_size=0.1)
    >>> x = SparseTensor(grid, torch.randn(len(grid), 4))
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval()
    >>> with torch.no_grad():
    ...     y = stream(net, x, budget_bytes=2_000_000)
    ...     torch.equal(y.features, net(x).features)
    True
    """
    ranks = Ranks.of(group)
    job = ranks.agreed(partial(_understood, net, x, budget_bytes, batch_size, device, resume, out, gather, ranks))
    store = Store(resume, ranks)
    with store.locked(), shown(progress, ranks.rank == 0) as told:
        return _streamed(job, budget_bytes, store, told, ranks)


@contextmanager
def shown(progress: Told | bool | None, draws: bool) -> Iterator[Told | None]:
    """What is told of each block: a function as it is, or a bar that is drawn meanwhile."""
    if not isinstance(progress, bool):
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be True or a function of (done, total); got {described(progress)}")
        yield progress
    elif not progress or not draws:
        yield None
    else:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
        except ImportError as error:
            raise ImportError(
                "progress=True draws a bar by the package rich: pip install 'sparseconv[cli]', or pass a function of "
                "(done, total)"
            ) from error
        columns = BarColumn(), MofNCompleteColumn(), "blocks", TimeElapsedColumn(), "left", TimeRemainingColumn()
        with Progress(*columns) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _streamed(job: Job, budget_bytes: int, store: Store, progress: Told | None, ranks: Ranks) -> Any:
    @torch.no_grad()
    def planned() -> tuple[Run, dict[str, Any]]:
        made = Run(job, budget_bytes, store, progress, ranks)
        return made, {"blocks": _blocks_of(made)}

    store.knows(job.about)
    run = ranks.agreed(planned)
    store.open({**job.about, "blocks": _blocks_of(run)})
    features: Any = Streamed.apply(run, job.scene.features, *job.parameters) if job.learns else None
    if not job.learns:
        with torch.no_grad():
            run.run()
    with ranks.together():  # the folder may go as soon as one rank has what it wants
        rows = [run.rows_of(number) for number in job.program.results]
        if job.learns:
            rows = [one._replace(features=by) for one, by in zip(rows, features)]
    found = dict(zip(job.program.results, rows))
    for step, parts in sorted(run.followers, key=lambda one: one[0].number):  # in the network's order
        step.follow(parts)
    with torch.no_grad():
        for buffer, value in job.counted:
            buffer.copy_(value)
    numbers = [number_of_leaf(leaf) for leaf in job.leaves]
    made = [leaf if n is None else _result(run, leaf, n, found[n]) for leaf, n in zip(job.leaves, numbers)]
    return pytree.tree_unflatten(made, job.layout)


def _understood(
    net: torch.nn.Module,
    x: Any,
    budget_bytes: int,
    batch_size: int | None,
    device: torch.device | str | None,
    resume: str | PathLike[str] | None,
    out: Any,
    gather: bool,
    ranks: Ranks,
) -> tuple[Job, dict[str, Any]]:
    """What is to be done, and in what of it all ranks must agree."""
    check_kind("net", net, torch.nn.Module, "pass the network")
    check_count("budget_bytes", budget_bytes, 1)
    scene = Scene.of(x, batch_size, max(PIECE, piece_of(budget_bytes)))
    first = next(net.parameters(), None)
    where = as_device(device) if device is not None else scene.features.device if first is None else first.device
    recording, returned, counted = recorded(net, scene.like, scene.features.shape[1], scene.features.dtype, where)
    leaves, layout = leaves_of(returned)
    numbers = [number_of_leaf(leaf) for leaf in leaves]
    program = Program(recording.steps, [n for n in numbers if n is not None])
    into = None if out is None else checked_out(out, program, scene, ranks)
    if _file_of(out) is not None and isinstance(x, (tuple, list)) and _file_of(out) in map(_file_of, x):
        raise ValueError("out is a file of x, which blocks still read: give it a file of its own")
    parameters = parameters_of(program)
    learns = torch.is_grad_enabled() and (scene.features.requires_grad or bool(parameters))
    if learns and (resume is not None or out is not None):
        raise ValueError("resume and out are for inference: call stream within torch.no_grad()")
    if not gather and (learns or resume is not None or out is not None):
        reason = "gradients need the whole result" if learns else "resume and out keep the whole result in files"
        raise ValueError(f"gather=False is for inference in memory, but {reason}: leave one of them out")
    about = {} if resume is None and ranks.size == 1 else _about(net, program, scene, where)
    sample = dict(enumerate(recording.values))
    job = Job(program, scene, where, sample, into, parameters, learns, about, leaves, layout, counted, gather)
    said: dict[str, Any] = {name: value[:12] for name, value in about.items()}
    said |= {
        "budget_bytes": budget_bytes,
        "whether resume is given": resume is not None,
        "gradients": learns,
        "gather": gather,
    }
    return job, {**said, "the file of out": _file_of(out)}


def _blocks_of(run: Run) -> str:
    """What tells a run's blocks from others."""
    return digest(run.program.cuts, *(block.box for plan in run.plans for block in plan))


def _about(net: torch.nn.Module, program: Program, scene: Scene, device: torch.device) -> dict[str, str]:
    """What a run is of, for one that goes on with it: of a large scene some of the rows."""
    count = len(scene) if scene.coords.nbytes + scene.features.nbytes <= WHOLE else 1000
    some = torch.linspace(0, max(0, len(scene) - 1), min(len(scene), count), dtype=torch.float64).round().long()
    coords, features = scene.coords[some.to(scene.coords.device)], scene.features[some.to(scene.features.device)]
    shapes = (tuple(scene.coords.shape), tuple(scene.features.shape), scene.features.dtype, scene.like.batch_size)
    state = net.state_dict()
    kept = {(value.data_ptr(), value.shape): name for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {
        "network": digest(*(t for item in state.items() for t in item)),
        "steps": digest(*(part for step in program.steps for part in _parts(step, kept))),
        "scene": digest(shapes, coords, features),
        "device": device.type,
    }


def _parts(value: Any, kept: dict[Any, str]) -> Iterator[Any]:
    """Texts and tensors that tell a step from others, the same in every process; ``kept`` are tensors with names."""
    if isinstance(value, torch.Tensor):
        yield kept.get((value.data_ptr(), value.shape), value)
    elif isinstance(value, (list, tuple, dict)):
        yield f"{type(value).__name__} {len(value)}"
        for one in value.items() if isinstance(value, dict) else value:
            yield from _parts(one, kept)
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for one in fields(value):
            yield from _parts((one.name, getattr(value, one.name)), kept)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, Fraction, torch.dtype)):
        yield f"{value!r};"
    else:  # a function, or what has no name but that of its kind
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)};"


def _file_of(out: Any) -> Any:
    """What tells one mapped file from others, on every host that sees it."""
    return (os.stat(out.filename).st_ino, out.offset) if isinstance(out, np.memmap) and out.filename else None


def checked_out(out: Any, program: Program, scene: Scene, ranks: Ranks) -> torch.Tensor:
    """The tensor that takes the result. Raises where it cannot."""
    into = as_rows("out", out)
    steps = [program.steps[n] for n in program.results]
    if len(steps) != 1 or steps[0].place != GRID:
        raise ValueError("out takes the rows of one result on the voxels of x, but the network returns something else")
    shape, dtype = (len(scene), *steps[0].channels), steps[0].dtype
    if tuple(into.shape) != shape or into.dtype != dtype:
        raise ValueError(f"out must be {shape} of {dtype}; got {tuple(into.shape)} of {into.dtype}")
    if _meets(into, scene.features) or _meets(into, scene.coords):
        raise ValueError("out lies in the memory of x, which blocks still read: give it memory of its own")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is an array that cannot be written: open its file with mode 'r+'")
    if ranks.size > 1 and (_file_of(out) is None or out.mode not in ("r+", "w+")):
        raise ValueError("of several ranks, out is one file that all map: numpy.load(name, mmap_mode='r+')")
    return into


def _meets(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether rows lie in the same memory, and not in other columns of it."""
    (first, last), (start, end) = (
        (t.data_ptr(), t.data_ptr() + t.itemsize * sum((n - 1) * step for n, step in zip(t.shape, t.stride())))
        for t in (a, b)
    )
    if not a.numel() or not b.numel() or a.device != b.device or first > end or start > last:
        return False
    pitch = a.stride(0) * a.itemsize
    if pitch != b.stride(0) * b.itemsize or a.stride(-1) != 1 or b.stride(-1) != 1 or not pitch:
        return True
    gap = (first - start) % pitch
    return gap < b.shape[-1] * b.itemsize or gap + a.shape[-1] * a.itemsize > pitch


def _result(run: Run, leaf: Any, number: int, rows: Result) -> Any:
    """One of the network's results, as the network gives it."""
    step, scene, features, coords = run.program.steps[number], run.scene, rows.features, rows.coords
    if rows.rows is not None:
        return Part(rows.rows, features)
    if not isinstance(leaf, SparseTensor):
        return features
    if scene.sparse is None:
        return features if coords is None else (features, coords)
    grid = scene.sparse.grid
    if coords is not None:
        place: Any = run.program.steps[step.place or GRID]
        size = [v * float(s) for v, s in zip(scene.like.voxel_size, place.scale)]
        grid = VoxelGrid(coords, scene.like.batch_size, size, scene.like.origin)
        grid.is_placed = scene.like.is_placed
    return SparseTensor(grid, features.to(grid.device))
