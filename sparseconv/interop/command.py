"""The ``convert`` command: a checkpoint of one library into one of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparseconv.files import check_place
from sparseconv.interop.checkpoints import Report, convert_state, read, write
from sparseconv.interop.layouts import LAYOUTS, layout_of
from sparseconv.interop.published import PUBLISHED, published_family

app = typer.Typer(add_completion=False)


def _pairs(values: list[str], option: str) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    wrong = [key for key, mark, value in pairs if not (key and mark and value)]
    if wrong:
        raise typer.BadParameter(f"{option} takes KEY=VALUE; got {', '.join(wrong)}")
    return {key: value for key, _, value in pairs}


def convert(
    path_in: Annotated[Path, typer.Argument(metavar="IN", help="checkpoint to read: .pth, .pt, .ckpt, .safetensors")],
    path_out: Annotated[Path, typer.Argument(metavar="OUT", help="checkpoint to write: .pth or .safetensors")],
    from_: Annotated[
        str | None,
        typer.Option("--from", help=f"library it comes from: {', '.join(LAYOUTS)}; published networks tell"),
    ] = None,
    to: Annotated[str, typer.Option("--to", help="library to write it for")] = "sparseconv",
    rank: Annotated[int, typer.Option(help="number of spatial axes")] = 3,
    kernel: Annotated[
        list[str] | None, typer.Option(help="KEY=3x3x1: taps along each axis of weights that match, where no cube")
    ] = None,
    groups: Annotated[list[str] | None, typer.Option(help="KEY=4: channel groups of weights that match")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="keys (patterns) of dense layers of that rank")] = None,
    ignore_class: Annotated[
        list[str] | None,
        typer.Option(help="full name of a class in the file, as argparse.Namespace, whose objects are left aside"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="only the last line")] = False,
) -> None:
    """Convert a checkpoint between libraries, and say what became of every tensor."""
    console = Console()
    try:
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
        options: dict[str, Any] = {"rank": rank, "kernel_sizes": sizes, "groups": counts, "skip": skip or []}
        made, report = convert_state(state, from_, to, **options)
        write(made, path_out)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    if not quiet:
        console.print(table(report))
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{report}; written to {path_out}", soft_wrap=True)


def table(report: Report) -> Table:
    """A report as a table of tensors."""
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


app.command()(convert)
