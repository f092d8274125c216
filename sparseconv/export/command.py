"""The ``export`` command: a saved program into a package for C++."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sparseconv.export.packaging import CPP, package


def package_program(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="what sparseconv.export.export wrote, .pt2")],
    output: Annotated[Path, typer.Argument(metavar="PACKAGE", help="the file to write, .pt2")],
) -> None:
    """Compile an exported program for this kind of CPU: a package that a C++ program runs without Python."""
    try:
        package(program, output)
    except (ValueError, RuntimeError) as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    Console().print(f"written to {output}; the operators that it calls are in {CPP}", soft_wrap=True)
