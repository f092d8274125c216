"""Files: what one may ask for before it is believed, files written whole, and files in folders where others may write.

What a process runs, compiled kernels and generated text, lies in a `private_folder`. What is data alone may lie in a
folder of several users: `open_plain` follows no link there."""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Literal

#: a file may unfold to this many bytes whatever its size, or to so many times its size
ALWAYS = 64 << 20
TIMES = 200
#: bytes that are read at once where only the checksum counts
BLOCK = 1 << 20


def most_bytes(size: int) -> int:
    """The memory that the contents of a file of ``size`` bytes may take: 200 times as much, and 64 MiB at least."""
    return max(ALWAYS, TIMES * size)


def check_archive(file: BinaryIO, size: int) -> None:
    """Raise ValueError where a zip archive is torn, unfolds beyond `most_bytes`, or a member's checksum is wrong.

    A member whose recorded checksum is 0 was written without one.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            check_members(archive, size)
            for member in archive.infolist():
                if member.CRC:
                    with archive.open(member) as content:
                        while content.read(BLOCK):
                            pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"its archive is damaged: {str(error) or type(error).__name__}") from error


def check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ValueError where the members of an archive unfold beyond `most_bytes`, or two have one name."""
    members = archive.infolist()
    total, most = sum(member.file_size for member in members), most_bytes(size)
    if total > most:
        raise ValueError(
            f"it unfolds to {total:,} bytes, {total // max(1, size):,} times its size, over the "
            f"{most:,} that are read: unpack it and save it uncompressed"
        )
    names = [member.filename for member in members]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"two of its members are called {twice[0]!r}")


def check_place(path: str | Path) -> Path:
    """The path of a file that can be written; a ValueError says why it cannot, before any work is done.

    >>> check_place("net.pt")
    PosixPath('net.pt')
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file in it")
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist: create it, or write {path.name} elsewhere")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"the folder {folder} cannot be written to: write {path.name} elsewhere")
    return path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A place to write a file at, which is moved to ``path`` at the end; after an error nothing is there.

    The place is in a new folder beside ``path`` that nobody else may enter: no link is followed, and a link at ``path``
    itself is replaced.

    >>> with TemporaryDirectory() as folder:
    ...     with written_whole(f"{folder}/a.txt") as part:
    ...         print(part.write_text("whole"), os.path.exists(f"{folder}/a.txt"))
    ...     print(Path(folder, "a.txt").read_text())
    5 False
    whole
    """
    path = check_place(path)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        part.replace(path)


#: how `open_plain` opens a file for each of its modes
FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def open_plain(path: str | Path, mode: Literal["rb", "r+b", "ab"]) -> BinaryIO:
    """Open a regular file; mode "ab" makes it where there is none. No link at ``path`` is followed, and nothing that is
    not a file, such as a pipe, is waited for. A folder above it may be a link.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a link or something else than a file is there.

    >>> with TemporaryDirectory() as folder:
    ...     with open_plain(f"{folder}/a.txt", "ab") as file:
    ...         print(file.write(b"whole"))
    ...     os.symlink(f"{folder}/a.txt", f"{folder}/b.txt")
    ...     open_plain(f"{folder}/b.txt", "ab")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: .../b.txt is a link or no regular file, which is not followed: remove it
    """
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    safe |= getattr(os, "O_BINARY", 0)
    refused = ValueError(f"{path} is a link or no regular file, which is not followed: remove it")
    if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):  # Windows; a link made after this is followed
        raise refused
    try:
        handle = os.open(path, FLAGS[mode] | safe, 0o666)
    except FileNotFoundError:
        raise
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise refused from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise refused
    return os.fdopen(handle, mode)


def private_folder(path: Path) -> bool:
    """Make a folder, where there is none; whether it is this user's own and nobody else may write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and _is_private(found)


def read_private(path: Path, most: int) -> bytes | None:
    """The at most ``most`` bytes of a file that is this user's own and that nobody else may write to; else None."""
    try:
        with open_plain(path, "rb") as file:
            found = os.fstat(file.fileno())
            return file.read() if _is_private(found) and found.st_size <= most else None
    except (OSError, ValueError):
        return None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user may read, by an atomic rename, so that no reader meets half of it."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _is_private(found: os.stat_result) -> bool:
    """Systems without user numbers have no mode to look at either."""
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)
