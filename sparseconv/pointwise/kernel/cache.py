"""Generated modules on disk and in memory."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


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
    rename, so no reader meets half of it. Where the folder cannot be written a private temporary folder serves.
    """
    name = f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    try:
        return _write(folder or cache_folder(), name, text)
    except OSError:
        return _write(_private_folder(), name, text)


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sparseconv_pointwise_"))


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
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
