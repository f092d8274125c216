"""Compiled kernels on disk, so that a second process need not compile them again."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from sparseconv.files import private_folder, read_private, write_private

MARK = b"sparseconv object 1\n"
BOUND = 64 << 20  # bytes of all files; the least recently used go first
LARGEST = 8 << 20  # bytes of one file: far above any kernel


def folder() -> Path | None:
    """Where objects are kept: $SPARSECONV_CACHE_DIR, else the user's cache folder; None where there is neither.

    The folder is the user's own and nobody else may write to it, since what lies in it is run.
    """
    root = os.environ.get("SPARSECONV_CACHE_DIR")
    if not root:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        root = os.path.join(cache, "sparseconv")
    if not os.path.isabs(root) or not hasattr(os, "geteuid"):
        return None
    path = Path(root) / "llvm"
    return path if private_folder(path) else None


def load(key: str) -> bytes | None:
    """The object stored under ``key``; None where there is none, or what lies there is not what was stored."""
    place = folder()
    if place is None:
        return None
    path = place / _name(key)
    text = read_private(path, LARGEST)
    if text is None:
        return None
    head, digest, payload = text[: len(MARK)], text[len(MARK) : len(MARK) + 32], text[len(MARK) + 32 :]
    if head != MARK or digest != _checksum(key, payload):
        return None
    with suppress(OSError):
        os.utime(path)  # the most recently used
    return payload


def store(key: str, payload: bytes) -> None:
    """Keep an object under ``key``, by an atomic rename; nothing happens where nothing can be kept."""
    place = folder()
    if place is None or len(payload) > LARGEST - len(MARK) - 32:
        return
    with suppress(OSError):
        write_private(place / _name(key), MARK + _checksum(key, payload) + payload)
        _shrink(place)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + ".o"


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(len(key).to_bytes(8, "little") + key.encode() + payload).digest()


def _shrink(place: Path) -> None:
    """The least recently used files go until three quarters of the bound are left."""
    files = []
    for entry in os.scandir(place):
        with suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            files.append((found.st_mtime, found.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    if total <= BOUND:
        return
    for _, size, path in sorted(files):
        with suppress(OSError):
            os.unlink(path)
        total -= size
        if total <= 3 * BOUND // 4:
            return
