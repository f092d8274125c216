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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from sparseconv.files import written_whole

FORMAT, MANIFEST = 1, "manifest.json"
#: bytes of one file and of all of them, at most
MAX_FILE, MAX_TOTAL = 64 << 20, 4 << 30
#: Triton's folder of a kernel, the files in it that are kept, and the prefix of a list of such files
_FOLDER = re.compile(r"[A-Z2-7]{52}")
_FILE = re.compile(r"[A-Za-z0-9_.+-]{1,200}\.(json|source|ttir|glir|ttgir|llir|ptx|cubin)")
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
    if file is None:
        run()
        torch.cuda.synchronize()
        return f"the kernels of {step} are compiled for {gpu}, in {cache}"
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        run()
        torch.cuda.synchronize()
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
    found = [
        path for path in sorted(cache.glob("*/*"))
        if path.is_file() and _FOLDER.fullmatch(path.parent.name) and _FILE.fullmatch(path.name)
    ]  # fmt: skip
    count = sum(path.suffix == ".cubin" for path in found)
    if not count:
        raise ValueError(f"no compiled kernel lies in {cache}")
    with written_whole(file) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps({"format": FORMAT, **gpu._asdict(), **_versions()}, indent=1))
        for path in found:
            archive.writestr(f"{path.parent.name}/{path.name}", path.read_bytes())
    return count


def unpack(file: Path, cache: Path, gpu: Gpu | None) -> int:
    """Put the kernels of a file into Triton's cache; returns their number.

    Raises:
        ValueError: the file is none, is damaged, or is for another GPU, another Triton or another sparseconv; then
            nothing was written. ``gpu`` None: what the file is for is not compared with any GPU.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _compare(archive, gpu, file)
            entries = _checked(archive, file)
            for entry in entries:
                _write(archive.read(entry), cache / entry.filename)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a file of compiled kernels, or is damaged: {error}") from None
    return sum(entry.filename.endswith(".cubin") for entry in entries)


def _versions() -> dict[str, str]:
    import triton

    import sparseconv

    return {"triton": triton.__version__, "sparseconv": sparseconv.__version__}


def _compare(archive: zipfile.ZipFile, gpu: Gpu | None, file: Path) -> None:
    """Raise where the manifest says that the kernels are for something else."""
    if MANIFEST not in archive.namelist() or archive.getinfo(MANIFEST).file_size > 1 << 16:
        raise zipfile.BadZipFile("it has no manifest")
    found = _json(archive.read(MANIFEST))
    if found.get("format") != FORMAT:
        raise zipfile.BadZipFile(f"its format is not {FORMAT}")
    for name, mine in _versions().items():
        if found.get(name) != mine:
            raise ValueError(f"{file} was made with {name} {found.get(name)}; here is {name} {mine}")
    theirs = Gpu(str(found.get("name")), tuple(found.get("capability", (0, 0))), found.get("processors", 0))
    if gpu is not None and theirs[1:] != gpu[1:]:
        raise ValueError(f"{file} is for another GPU, {theirs}; this is {gpu}")


def _checked(archive: zipfile.ZipFile, file: Path) -> list[zipfile.ZipInfo]:
    """The entries, each a file in a kernel's folder; lists of files come last, when the files are there."""
    entries = [entry for entry in archive.infolist() if entry.filename != MANIFEST]
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        if not _FOLDER.fullmatch(folder) or not _FILE.fullmatch(name):
            raise ValueError(f"{file} holds {entry.filename!r}, which is not a file of a compiled kernel")
        if entry.file_size > MAX_FILE:
            raise ValueError(f"{file} holds {entry.filename!r} of {entry.file_size:,} bytes, more than {MAX_FILE:,}")
    if sum(entry.file_size for entry in entries) > MAX_TOTAL:
        raise ValueError(f"{file} holds more than {MAX_TOTAL:,} bytes")
    damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged!r} does not match its checksum")
    for entry in entries:
        if f"/{_GROUP}" in entry.filename:
            dict(_json(archive.read(entry))["child_paths"])
    return sorted(entries, key=lambda entry: f"/{_GROUP}" in entry.filename)


def _write(data: bytes, path: Path) -> None:
    """Write a file whole or not at all; a list of files gets the paths that they have here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith(_GROUP):
        names = [Path(child).name for child in _json(data)["child_paths"]]
        data = json.dumps({"child_paths": {name: str(path.parent / name) for name in names}}).encode()
    with written_whole(path) as part:
        part.write_bytes(data)


def _json(data: bytes) -> dict[str, Any]:
    """A JSON object; else BadZipFile."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise zipfile.BadZipFile(str(error)) from None
    if not isinstance(found, dict):
        raise zipfile.BadZipFile("no JSON object")
    return found
