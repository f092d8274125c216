"""The ``compile`` command: fill Triton's cache before a job starts, and carry its kernels to other machines.

A file of kernels is a zip archive: ``manifest.json`` says what they are for, the rest is what Triton's cache holds, by
kernel. Triton's libraries in C are left out, since they belong to a machine. A kernel is code: unpack what you trust.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from sparseconv.files import check_archive, written_whole

FORMAT, MANIFEST = 1, "manifest.json"
#: a file in Triton's folder of a kernel, and the prefix of a list of such files
_FILE = re.compile(r"[A-Z2-7]{52}/[A-Za-z0-9_.+-]{1,200}\.(json|source|ttir|glir|ttgir|llir|ptx|cubin)")
_GROUP = "__grp__"


class Gpu(NamedTuple):
    """What compiled kernels depend on of a GPU, and its name."""

    name: str
    capability: tuple[int, int]
    processors: int

    @classmethod
    def current(cls) -> Gpu | None:
        """The current GPU; None where torch sees none."""
        import torch  # not above: ``sparseconv --help`` imports this file

        if not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(found.name, (found.major, found.minor), found.multi_processor_count)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor}, {self.processors} multiprocessors)"


def compile_step(
    step: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FUNCTION]", help="Function without arguments that runs one training step."),
    ] = None,
    pack_to: Annotated[
        Path | None,
        typer.Option("--pack", help="Also write the kernels to this file, for machines with the same kind of GPU."),
    ] = None,
    unpack_from: Annotated[
        Path | None, typer.Option("--unpack", help="Put the kernels of such a file into Triton's cache.")
    ] = None,
) -> None:
    """Compile all kernels of a training step ahead of time, or unpack those of another machine."""
    try:
        if (step is None) == (unpack_from is None) or (unpack_from is not None and pack_to is not None):
            raise ValueError("give MODULE:FUNCTION, with --pack FILE or without; or --unpack FILE")
        with Console(stderr=True).status("unpacking kernels" if unpack_from else f"compiling the kernels of {step}"):
            text = _compile(str(step), pack_to) if unpack_from is None else _unpack(unpack_from)
    except (ValueError, TypeError, ImportError, OSError) as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    Console().print(Text(text), soft_wrap=True)


def _compile(step: str, file: Path | None) -> str:
    gpu = Gpu.current()
    if gpu is None:
        raise ValueError("kernels are compiled for the GPU of this machine, and torch sees none")
    run = find_step(step)
    import torch
    from triton import knobs

    cache = Path(knobs.cache.dir)
    with tempfile.TemporaryDirectory() as folder:
        if file is not None:
            knobs.cache.dir = folder
        run()
        torch.cuda.synchronize()
        if file is None:
            return f"the kernels of {step} are compiled for {gpu}, in {cache}"
        count = pack(Path(folder), file, gpu)
    unpack(file, cache, gpu)
    return f"{count} kernels for {gpu} in {file}, and in {cache}"


def _unpack(file: Path) -> str:
    from triton import knobs

    gpu = Gpu.current()
    count = unpack(file, Path(knobs.cache.dir), gpu)
    return f"{count} kernels in {knobs.cache.dir}" + (f" for {gpu}" if gpu else ", not compared with any GPU")


def find_step(step: str) -> Callable[[], Any]:
    """The function that ``MODULE:FUNCTION`` names; ValueError or ImportError where there is none."""
    module, _, name = step.partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"a step is given as MODULE:FUNCTION; got {step!r}")
    sys.path.insert(0, "")
    found: Callable[[], Any] | None = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    return found


def pack(cache: Path, file: Path, gpu: Gpu) -> int:
    """Write what Triton's cache holds to a file; returns the number of kernels."""
    found = {path.relative_to(cache).as_posix(): path for path in sorted(cache.glob("*/*")) if path.is_file()}
    kept = {name: path for name, path in found.items() if _FILE.fullmatch(name)}
    if not any(name.endswith(".cubin") for name in kept):
        raise ValueError(f"no compiled kernel lies in {cache}")
    with written_whole(file) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps({"format": FORMAT, **gpu._asdict(), **_versions()}, indent=1))
        for name, path in kept.items():
            archive.write(path, name)
    return _kernels(kept)


def unpack(file: Path, cache: Path, gpu: Gpu | None) -> int:
    """Put the kernels of a file into Triton's cache; returns their number.

    Raises:
        ValueError: the file is none, is damaged, or is for another GPU, another Triton or another sparseconv; then
            nothing was written. ``gpu`` None: what the file is for is not compared with any GPU.
    """
    try:
        with open(file, "rb") as content:
            check_archive(content, file.stat().st_size)
        with zipfile.ZipFile(file) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            theirs = Gpu(str(manifest["name"]), tuple(manifest["capability"]), manifest["processors"])
            lists, names = {}, [name for name in archive.namelist() if name != MANIFEST]
            for name in names:
                if not _FILE.fullmatch(name):
                    raise ValueError(f"it holds {name!r}, which is not a file of a compiled kernel")
                if f"/{_GROUP}" in name:
                    lists[name] = [Path(child).name for child in dict(json.loads(archive.read(name))["child_paths"])]
            if not _kernels(names):
                raise ValueError("it holds no compiled kernel")
            for what, here in {"format": FORMAT, **_versions()}.items():
                if manifest[what] != here:
                    raise ValueError(f"it was made with {what} {manifest[what]}; here is {what} {here}")
            if gpu is not None and theirs[1:] != gpu[1:]:
                raise ValueError(f"it is for another GPU, {theirs}; this is {gpu}")
            for name in sorted(names, key=lists.__contains__):  # lists of files come last, when the files are there
                path = cache / name
                path.parent.mkdir(parents=True, exist_ok=True)
                children = {child: str(path.parent / child) for child in lists.get(name, ())}
                with written_whole(path) as part:
                    part.write_bytes(json.dumps({"child_paths": children}).encode() if children else archive.read(name))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not a file of compiled kernels for this machine: {error}") from None
    return _kernels(names)


def _kernels(names: Iterable[str]) -> int:
    return sum(name.endswith(".cubin") for name in names)


def _versions() -> dict[str, str]:
    import triton

    import sparseconv

    return {"triton": triton.__version__, "sparseconv": sparseconv.__version__}
