"""What a streamed run keeps: rows in host memory, or in a folder from which an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: how numbers are written that numpy has no name for
NUMPY = {torch.bfloat16: np.dtype(np.int16)}


class Store:
    """Arrays in memory, or memory-mapped files in ``folder``; pieces that blocks leave, and which blocks are done."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._pieces: dict[str, Any] = {}
        self._done: set[str] = set()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            log = self.folder / "done.txt"
            lines = log.read_text().split("\n")[:-1] if log.exists() else []
            self._done = set(lines)
            _written(log, "".join(f"{line}\n" for line in lines).encode())  # without half a line at its end

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An array (of any content), in the folder where there is one."""
        if self.folder is None or 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        path, kind = self.folder / f"{name}.npy", NUMPY.get(dtype) or torch.empty(0, dtype=dtype).numpy().dtype
        there = path.exists()
        array = np.lib.format.open_memmap(path, "r+" if there else "w+", None if there else kind, tuple(shape))
        return torch.from_numpy(array).view(dtype)

    def identify(self, about: dict[str, Any]) -> None:
        """Remember what this run is of. Raises ValueError where the folder holds a run of something else."""
        if self.folder is None:
            return
        path, text = self.folder / "stream.json", json.dumps(about, indent=1, sort_keys=True)
        if path.exists():
            before = json.loads(path.read_text())
            differing = [name for name in sorted({*before, *about}) if before.get(name) != json.loads(text).get(name)]
            if differing:
                raise ValueError(
                    f"{self.folder} holds a run that differs in {', '.join(differing)}: it cannot go on with another "
                    "network, scene or budget. Give the same, or a new folder"
                )
            return
        _written(path, text.encode())

    def is_done(self, task: str) -> bool:
        return task in self._done

    def finish(self, task: str) -> None:
        """A task's results are all kept."""
        if self.folder is not None:
            with (self.folder / "done.txt").open("a") as log:
                log.write(task + "\n")
        self._done.add(task)

    def put(self, name: str, piece: Any) -> None:
        """Keep tensors, and tuples and lists of them."""
        if self.folder is None:
            self._pieces[name] = piece
            return
        path = self.folder / f"{name}.pt"
        torch.save(piece, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def get(self, name: str) -> Any:
        """What was kept; None for nothing."""
        if self.folder is None:
            return self._pieces.get(name)
        path = self.folder / f"{name}.pt"
        return torch.load(path, weights_only=True) if path.exists() else None


def _written(path: Path, data: bytes) -> None:
    """A file that is there as a whole or not at all."""
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


def digest(*parts: Any) -> str:
    """SHA-256 of texts and tensors."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            found.update(str(part).encode())
    return found.hexdigest()
