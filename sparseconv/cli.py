"""The commands: a demonstration, a benchmark, other libraries' checkpoints, kernels, and what can run here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

import sparseconv
from sparseconv.bench.command import bench
from sparseconv.export.command import package_program
from sparseconv.gpu.precompile import compile_step
from sparseconv.info import text
from sparseconv.interop.command import convert

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.command()(convert)
app.command()(bench)
app.command("compile")(compile_step)
app.command("export")(package_program)


@contextmanager
def _one_sentence() -> Iterator[Console]:
    """What the user can mend ends as one sentence on stderr and exit status 1; an interruption as status 130."""
    try:
        yield Console()
    except ModuleNotFoundError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; nothing was written", soft_wrap=True)
        raise typer.Exit(130) from None


@app.command()
def demo(
    points: Annotated[
        Path | None,
        typer.Option(
            help="A cloud instead of the brain: .npy, .npz, .bin, .xyz, .txt, .csv, .ply, .pcd, .las or .laz."
        ),
    ] = None,
    voxel_size: Annotated[
        float | None,
        typer.Option(help="Edge of a voxel: mm for the brain (default 3, on a GPU 2), the file's unit for a cloud."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps on the brain.", min=1)] = 120,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    output: Annotated[Path, typer.Option(help="The picture to write.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of the network's first weights.")] = 0,
    columns: Annotated[
        int | None, typer.Option(help="Numbers a point in a .bin: 4 (KITTI) or 5 (nuScenes), where it does not tell.")
    ] = None,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Leave out points of the cloud that are NaN or infinite.")
    ] = False,
) -> None:
    """Train a sparse U-Net on a real brain volume, or convolve a point cloud of yours; write a picture."""
    with _one_sentence() as console:
        from sparseconv.viz.figures import checked_picture_path

        _leave_a_core()
        where = _device(device)
        output = checked_picture_path(output)
        if voxel_size is not None and not 0 < voxel_size < float("inf"):
            raise ValueError(f"--voxel-size must be positive; got {voxel_size:g}")
        if points is None:
            from sparseconv.demo.segment import segment_brain

            finished = segment_brain(console, where, output, voxel_size, steps, seed)
        else:
            from sparseconv.demo.convolve import convolve_cloud

            finished = convolve_cloud(
                console, where, output, points, voxel_size, seed, columns=columns, drop_nonfinite=drop_nonfinite
            )
        if not finished:
            raise typer.Exit(130)


@app.command()
def info() -> None:
    """Print what a bug report needs: versions, processor, cards, and which backends can run here or why not."""
    typer.echo(text())


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sparseconv {sparseconv.__version__}")
        raise typer.Exit


@app.callback()
def version(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Sparse convolution with plan objects: plan once, execute many times."""


def _leave_a_core() -> None:
    """Leave one core free, unless the user sets OMP_NUM_THREADS.

    On a busy machine torch's threads spin while they wait for one that has no core, which is slower than one thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _device(name: str) -> torch.device:
    """The device of that name, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here; use --device cpu")
    return device
