"""The command line: demo, info, bench, convert, compile and export. ``--help`` needs no torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

import sparseconv
from sparseconv.bench.command import bench
from sparseconv.gpu.precompile import compile_step

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from sparseconv.interop import Report

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
#: suffixes of checkpoints that ``convert`` reads and writes
READ, WRITTEN = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".safetensors"), (".pth", ".pt", ".safetensors")


@contextmanager
def _one_sentence() -> Iterator[Console]:
    """Errors that the user can fix end as one sentence on stderr with status 1, an interruption with status 130."""
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
            help="A point cloud instead of the brain: .npy, .npz, .bin, .xyz, .txt, .csv, .ply, .pcd, .las or .laz."
        ),
    ] = None,
    voxel_size: Annotated[
        float | None,
        typer.Option(help="Voxel size: in mm for the brain (default 3, on a GPU 2), in the file's unit for a cloud."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of training steps on the brain.", min=1)] = 120,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto, which uses a GPU if there is one.")] = "auto",
    output: Annotated[Path, typer.Option(help="Picture to write.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Random seed of the initial weights.")] = 0,
    columns: Annotated[
        int | None,
        typer.Option(help="Numbers per point of a .bin file: 4 (KITTI) or 5 (nuScenes)."),
    ] = None,
    drop_nonfinite: Annotated[
        bool, typer.Option("--drop-nonfinite", help="Drop points that are NaN or infinite.")
    ] = False,
) -> None:
    """Train a sparse U-Net on a brain scan, or convolve your own point cloud, and write a picture."""
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
    """Print what a bug report needs: versions, CPU, GPUs, and which backends can run here."""
    from sparseconv.info import text

    typer.echo(text())


@app.command()
def convert(
    path_in: Annotated[Path, typer.Argument(metavar="IN", help=f"Checkpoint to read: {', '.join(READ)}.")],
    path_out: Annotated[Path, typer.Argument(metavar="OUT", help=f"Checkpoint to write: {', '.join(WRITTEN)}.")],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Library of IN: spconv, minkowski, torchsparse, fvdb, flexgemm, warpconvnet, torch, spconv-rsck "
            "(spconv 1.x), spconv-rskc or sparseconv. Published networks are recognized without it.",
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", help="Library of OUT.")] = "sparseconv",
    rank: Annotated[int, typer.Option(help="Number of spatial axes.")] = 3,
    kernel: Annotated[
        list[str] | None, typer.Option(help="KEY=3x3x1: kernel size of the weights that match KEY, if it is no cube.")
    ] = None,
    groups: Annotated[list[str] | None, typer.Option(help="KEY=4: groups of the weights that match KEY.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Keys of dense layers to copy unchanged; patterns.")] = None,
    ignore_class: Annotated[
        list[str] | None,
        typer.Option(help="Full name of a class, such as argparse.Namespace, whose objects in IN are skipped."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the last line only.")] = False,
) -> None:
    """Convert a checkpoint between libraries and list what happened to every tensor.

    Example: sparseconv convert model.pth model.safetensors --from spconv
    """
    with _one_sentence() as console:
        for path, known, what in ((path_in, READ, "read"), (path_out, WRITTEN, "write")):
            if path.suffix.lower() not in known:
                raise ValueError(f"cannot {what} {path}: checkpoints end with {', '.join(known)}")
        from sparseconv.files import check_place
        from sparseconv.interop import PUBLISHED, convert_state, published_family, read, write
        from sparseconv.interop.layouts import layout_of

        sizes = {k: [int(n) for n in v.split("x")] for k, v in _pairs(kernel or [], "--kernel").items()}
        counts = {k: int(v) for k, v in _pairs(groups or [], "--groups").items()}
        for library in filter(None, (from_, to)):
            layout_of(library)
        check_place(path_out)
        state = read(path_in, ignore_classes=ignore_class or [])
        if from_ is None:
            name, prefix = published_family(state)
            from_ = PUBLISHED[name].layout
            under = f" under {prefix}" if prefix else ""
            console.print(f"{name}{under}: sparseconv.nn.{PUBLISHED[name].network}", soft_wrap=True)
        made, report = convert_state(state, from_, to, rank=rank, kernel_sizes=sizes, groups=counts, skip=skip or [])
        write(made, path_out)
        if not quiet:
            console.print(_conversions(report))
        for note in report.notes:
            console.print(f"note: {note}", soft_wrap=True)
        console.print(f"{report}; written to {path_out}", soft_wrap=True)


app.command()(bench)
app.command("compile")(compile_step)


@app.command("export")
def package_program(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="File of sparseconv.export.export, .pt2.")],
    output: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Package to write, .pt2.")],
) -> None:
    """Compile an exported program for this kind of CPU, to run in C++ without Python."""
    with _one_sentence() as console:
        from sparseconv.export.packaging import CPP, package

        try:
            with console.status(f"compiling {program} with AOTInductor; this takes up to some minutes"):
                package(program, output)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        console.print(f"written to {output}; the operators that it calls are in {CPP}", soft_wrap=True)


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
    """Sparse convolution for PyTorch: plan once, execute many times."""


def _pairs(values: list[str], option: str) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    wrong = [key for key, mark, value in pairs if not (key and mark and value)]
    if wrong:
        raise typer.BadParameter(f"{option} takes KEY=VALUE; got {', '.join(wrong)}")
    return {key: value for key, _, value in pairs}


def _conversions(report: Report) -> Table:
    """A report as a table of tensors."""
    from rich.table import Table

    made = Table(title=f"{report.source} → {report.target}")
    for name in ("key", "shape", "new key", "new shape", ""):
        made.add_column(name, overflow="fold")
    for entry in report.entries:
        same = entry.key_in == entry.key_out, entry.shape_in == entry.shape_out
        made.add_row(
            entry.key_in,
            str(entry.shape_in),
            "=" if same[0] else entry.key_out,
            "=" if same[1] else str(entry.shape_out),
            entry.what,
            style="bold" if entry.what == "convolution" else "dim",
        )
    return made


def _leave_a_core() -> None:
    """Leave one core free, unless the user sets OMP_NUM_THREADS.

    On a busy machine torch's threads spin while they wait for the slowest, which is slower than one thread.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _device(name: str) -> torch.device:
    """The device of that name; raises ValueError if it is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return device
