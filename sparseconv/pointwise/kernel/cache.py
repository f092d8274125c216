"""Generated modules on disk and in memory."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from sparseconv.files import private_folder, read_private, write_private


def cache_folder() -> Path:
    """Where generated text is kept: $SPARSECONV_CACHE_DIR, else the user's cache folder, else a private one.

    A process in a container may have neither $HOME nor an entry among the users.
    """
    root = os.environ.get("SPARSECONV_CACHE_DIR")
    if root:
        return Path(root) / "pointwise"
    try:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return _private_folder()
    return Path(user) / "sparseconv" / "pointwise"


def store(stem: str, text: str, folder: Path | None = None) -> Path:
    """Write ``text`` to a file named after its own content, unless it is there; safe among processes and threads.

    The name holds a hash of the whole text, hence of everything that the text depends on. The file appears by an atomic
    rename, so no reader meets half of it. Triton compiles what lies there, so the folder is the user's own and nobody
    else may write to it; where it is not, or cannot be written, a private temporary folder serves.
    """
    data = text.encode()
    name = f"{stem}_{hashlib.sha256(data).hexdigest()[:20]}.py"
    place = folder or cache_folder()
    if private_folder(place):
        with suppress(OSError):
            return _write(place / name, data)
    return _write(_private_folder() / name, data)


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sparseconv_pointwise_"))


def _write(path: Path, data: bytes) -> Path:
    if read_private(path, len(data)) != data:
        write_private(path, data)
    return path


def load(path: Path, text: str, bindings: Mapping[str, Any]) -> ModuleType:
    """Execute ``text`` as a module of its own, in which the names of ``bindings`` are known.

    Each caller gets a new module, because two functions may share a text and differ in what is bound.
    """
    module = ModuleType(f"sparseconv.pointwise.generated.{path.stem}")
    module.__file__ = str(path)
    module.__dict__.update(bindings)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
