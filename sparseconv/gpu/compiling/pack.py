"""Compiled kernels in one file, for other machines with such a card.

The file is a zip archive: ``manifest.json`` says what the kernels are for, the rest is what Triton keeps, by kernel.
Triton's libraries in C are left out: they belong to a machine. A kernel is code: unpack what you trust.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparseconv.gpu.compiling.job import MARKS
from sparseconv.gpu.compiling.starting import folder_of

FORMAT, MANIFEST = 1, "manifest.json"
#: bytes of one file and of all of them, at most
MOST_BYTES, MOST_TOTAL = 64 << 20, 4 << 30
_FOLDER = re.compile(r"[A-Z2-7]{52}")
_KEPT = re.compile(r"[A-Za-z0-9_.+-]{1,200}\.(json|source|ttir|glir|ttgir|llir|ptx|cubin)|[0-9a-f]{64}")
_GROUP = "__grp__"


class Card(NamedTuple):
    """What compiled kernels depend on of a card, and its name."""

    name: str
    capability: tuple[int, int]
    processors: int

    @classmethod
    def here(cls) -> Card | None:
        """The current card; None where there is none."""
        if not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(found.name, (found.major, found.minor), found.multi_processor_count)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor}, {self.processors} multiprocessors)"


def pack(cache: Path, file: Path, card: Card) -> int:
    """Write what Triton's cache holds to a file; returns the number of kernels."""
    kept = [
        path
        for folder in sorted(cache.iterdir())
        if folder.is_dir() and _FOLDER.fullmatch(folder.name)
        for path in sorted(folder.iterdir())
        if path.is_file() and _KEPT.fullmatch(path.name)
    ]
    count = sum(path.suffix == ".cubin" for path in kept)
    if not count:
        raise ValueError(f"no compiled kernel lies in {cache}")
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, json.dumps({"format": FORMAT, **card._asdict(), **versions()}, indent=1))
            for path in kept:
                archive.writestr(f"{path.parent.name}/{path.name}", _relative(path))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return count


def unpack(file: Path, cache: Path, card: Card | None) -> int:
    """Put the kernels of a file into Triton's cache; returns their number.

    Raises:
        ValueError: the file is none, is damaged, or is for another card, another Triton or another sparseconv; then
            nothing was written. ``card`` None: no card is here, and what the file is for is not compared with it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _compare(_manifest(archive), card, file)
            entries = _checked(archive, file)
            return _write(archive, entries, cache)
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        TypeError,
        KeyError,
    ) as error:
        raise ValueError(f"{file} is no file of compiled kernels, or is damaged: {error}") from None


def versions() -> dict[str, str]:
    """What kernels are compiled by."""
    import triton

    import sparseconv

    return {"triton": triton.__version__, "sparseconv": sparseconv.__version__}


def _manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    if MANIFEST not in archive.namelist() or archive.getinfo(MANIFEST).file_size > 1 << 16:
        raise zipfile.BadZipFile("it has no manifest")
    found = json.loads(archive.read(MANIFEST))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise zipfile.BadZipFile(f"its format is not {FORMAT}")
    return found


def _compare(manifest: dict[str, Any], card: Card | None, file: Path) -> None:
    for name, mine in versions().items():
        if manifest.get(name) != mine:
            raise ValueError(f"{file} was made with {name} {manifest.get(name)}; here is {name} {mine}")
    if card is not None:
        theirs = Card(
            str(manifest.get("name")), tuple(manifest.get("capability", (0, 0))), manifest.get("processors", 0)
        )
        if theirs[1:] != card[1:]:
            raise ValueError(f"{file} is for another card: for {theirs}; here is {card}")


def _checked(archive: zipfile.ZipFile, file: Path) -> list[zipfile.ZipInfo]:
    """The entries, each the name of a kernel's folder and of a file in it, in an order in which groups come last."""
    entries = [entry for entry in archive.infolist() if entry.filename != MANIFEST]
    for entry in entries:
        folder, slash, name = entry.filename.partition("/")
        if not slash or not _FOLDER.fullmatch(folder) or not _KEPT.fullmatch(name):
            raise ValueError(f"{file} holds {entry.filename!r}, which is no file of a compiled kernel")
        if entry.file_size > MOST_BYTES:
            raise ValueError(f"{file} holds {entry.filename!r} of {entry.file_size:,} bytes, more than {MOST_BYTES:,}")
    if sum(entry.file_size for entry in entries) > MOST_TOTAL:
        raise ValueError(f"{file} holds more than {MOST_TOTAL:,} bytes")
    damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged!r} does not match its checksum")
    for entry in entries:
        if f"/{_GROUP}" in entry.filename:
            _files_of(archive.read(entry))

    def turn(entry: zipfile.ZipInfo) -> int:
        folder, _, name = entry.filename.partition("/")
        return 2 if folder == folder_of(MARKS) else int(name.startswith(_GROUP))

    return sorted(entries, key=turn)


def _write(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], cache: Path) -> int:
    count = 0
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        place = cache / folder
        place.mkdir(parents=True, exist_ok=True)
        data = archive.read(entry)
        if name.startswith(_GROUP):
            data = json.dumps({"child_paths": {child: str(place / child) for child in _files_of(data)}}).encode()
        partial = place / f"{uuid.uuid4().hex}.partial"
        try:
            partial.write_bytes(data)
            os.replace(partial, place / name)
        finally:
            partial.unlink(missing_ok=True)
        count += name.endswith(".cubin")
    return count


def _relative(path: Path) -> bytes:
    """What a file holds; of a group the names of its files, without the folder of this machine."""
    data = path.read_bytes()
    if not path.name.startswith(_GROUP):
        return data
    return json.dumps({"child_paths": {name: name for name in json.loads(data)["child_paths"]}}).encode()


def _files_of(group: bytes) -> list[str]:
    """The names of a group's files, wherever it says that they lie."""
    return [Path(name).name for name in dict(json.loads(group)["child_paths"])]
