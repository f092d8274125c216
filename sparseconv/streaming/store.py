"""What a streamed run keeps: rows in host memory, or in a folder from which an interrupted run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparseconv.geometry.ranges import IndexRange


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
        size = math.prod(shape)
        if self.folder is None or not size:
            return torch.empty(tuple(shape), dtype=dtype)
        path = self.folder / f"{name}.bin"
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(tuple(shape))

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

    def remembered(self, name: str) -> Any:
        """What was kept under a name by this run or the one that it goes on with; None for nothing."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path is not None and path.exists() else None

    def remember(self, name: str, value: Any) -> None:
        if self.folder is not None:
            _written(self.folder / f"{name}.json", json.dumps(value).encode())

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

    def drop(self, name: str) -> None:
        if self.folder is None:
            self._pieces.pop(name, None)
        else:
            (self.folder / f"{name}.pt").unlink(missing_ok=True)


def _written(path: Path, data: bytes) -> None:
    """A file that is there as a whole or not at all."""
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


def listed(box: IndexRange | None) -> list[list[int]] | None:
    """A box as json has it."""
    return None if box is None else [list(box.start), list(box.end)]


def unlisted(box: Any) -> IndexRange | None:
    return None if box is None else IndexRange(tuple(box[0]), tuple(box[1]))
