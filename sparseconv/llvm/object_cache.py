"""Compiled kernels on disk, so that a second process need not compile them again."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

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
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError:
        return None
    return path if stat.S_ISDIR(found.st_mode) and _private(found) else None


def load(key: str) -> bytes | None:
    """The object stored under ``key``; None where there is none, or what lies there is not what was stored."""
    place = folder()
    if place is None:
        return None
    path = place / _name(key)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not (stat.S_ISREG(found.st_mode) and _private(found) and found.st_size <= LARGEST):
            return None
        text = file.read()
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
    draft = None
    try:
        handle, draft = tempfile.mkstemp(prefix=".draft", dir=place)  # of mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(MARK + _checksum(key, payload) + payload)
        os.replace(draft, place / _name(key))
        _shrink(place)
    except OSError:
        if draft is not None:
            with suppress(OSError):
                os.unlink(draft)


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


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
