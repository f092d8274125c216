"""The ``compile`` command: fill Triton's cache before a job starts, and carry it to other machines."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text


def compile_step(
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]", help="a function without arguments that takes one training step on the card"
        ),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="write the kernels to this file, for machines with such a card")
    ] = None,
    unpack: Annotated[Path | None, typer.Option(help="put the kernels of such a file into Triton's cache")] = None,
) -> None:
    """Compile all kernels of a step, or unpack those that another machine compiled."""
    try:
        if (step is None) == (unpack is None) or (unpack is not None and pack is not None):
            raise ValueError(
                "give MODULE:FUNCTION, to compile what it runs, with --pack FILE or without; or --unpack FILE"
            )
        said = _unpack(unpack) if unpack is not None else _compile(str(step), pack)
    except (ValueError, TypeError, ImportError, OSError) as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    Console().print(Text(said), soft_wrap=True)


def _unpack(file: Path) -> str:
    from sparseconv.gpu.compiling.pack import Card, unpack
    from sparseconv.gpu.compiling.starting import cache_dir

    card = Card.here()
    count = unpack(file, Path(cache_dir()), card)
    where = "no card is here to compare with" if card is None else f"for {card}"
    return f"{count} kernels in {cache_dir()}, {where}"


def _compile(step: str, file: Path | None) -> str:
    from sparseconv.gpu.compiling.pack import Card, pack, unpack
    from sparseconv.gpu.compiling.starting import cache_dir

    card = Card.here()
    if card is None:
        raise ValueError("kernels are compiled for the card that is here, and torch sees none")
    run, real = _found(step), Path(cache_dir())
    if file is None:
        _finish(run)
        return f"what {step} runs is compiled for {card}, in {real}"
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        _finish(run)
        count = pack(Path(folder), file, card)
    unpack(file, real, card)
    return f"{count} kernels for {card} in {file}, and in {real}"


def _finish(run: Callable[[], Any]) -> None:
    import torch

    from sparseconv.gpu.launcher import await_compilers

    run()
    torch.cuda.synchronize()
    await_compilers()


def _found(step: str) -> Callable[[], Any]:
    module, _, name = step.partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"a step is given as MODULE:FUNCTION; got {step!r}")
    sys.path.insert(0, "")
    found: Callable[[], Any] | None = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    return found
