"""What a streamed run keeps: rows in host memory, or in a folder from which an interrupted run goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from sparseconv.files import check_archive, open_plain, written_whole
from sparseconv.streaming.digests import digest
from sparseconv.streaming.ranks import ALONE, Ranks

#: locks of files; Windows has others
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
#: a line of finished blocks: phase, block, and a digest of what it left
DONE = re.compile(r"\d+\.\d+ \w*")
#: how numbers are written that numpy has no name for
NUMPY = {torch.bfloat16: np.dtype(np.int16)}


class Part(NamedTuple):
    """The rows of a result that one of several ranks computed: their numbers ``rows`` (M,) int64 in the scene, each
    once and in no order that is promised, and their ``features`` (M, C), in host memory."""

    rows: torch.Tensor
    features: torch.Tensor


class OwnRows:
    """A `Part` of so many rows that blocks fill one after another."""

    def __init__(self, count: int, channels: Sequence[int], dtype: torch.dtype | None) -> None:
        assert dtype is not None
        self.part, self._filled = Part(in_memory((count,), torch.int64), in_memory((count, *channels), dtype)), 0

    def append(self, write: Callable[[torch.Tensor, None, torch.Tensor], None], *block: torch.Tensor) -> None:
        """A block's rows and their features, which ``write`` brings."""
        first, self._filled = self._filled, self._filled + len(block[0])
        for whole, values in zip(self.part, block):
            write(whole[first : self._filled], None, values)


class Store:
    """Arrays in memory, or memory-mapped files in ``folder``; pieces that blocks leave, and which blocks are done.

    Several ranks share one folder, which all of them must see: without a name rank 0 makes one that goes with the run.
    Others may write in it: no link there is followed, and what is damaged is a ValueError.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, ranks: Ranks | None = None) -> None:
        self.ranks = ALONE if ranks is None else ranks
        self._is_made = folder is None and self.ranks.size > 1
        if self._is_made:
            own = self.ranks.agreed(lambda: (None if self.ranks.rank else tempfile.mkdtemp(prefix="stream-"), {}))
            folder = self.ranks.heard(own)[0]
            if self.ranks.rank == 0:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.ranks.agreed(lambda: (self._make(), {}))
        if self.ranks.size > 1:
            token = self.ranks.heard(os.urandom(8).hex())[0]
            self.ranks.agreed(lambda: (self._show(token), {}))
            self.ranks.agreed(lambda: (self._see(token), {}))
        self._pieces: dict[str, Any] = {}
        #: names of shared arrays, by where they lie
        self._names: dict[int, str] = {}
        #: finished tasks, each with a digest of some rows that it left
        self._done: dict[str, str] = {}
        self._lock: Any = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises ValueError where another run uses the folder, as far as its file system can tell."""
        try:
            self.ranks.agreed(lambda: (self._hold(), {}))
            yield
        finally:
            if self._lock is not None:
                self._lock.close()

    def _hold(self) -> bool:
        if fcntl is None or self.folder is None or self.ranks.rank:
            return False
        self._lock = open_plain(self.folder / "lock.txt", "ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.folder} is used by another run: wait for it, or give another folder") from None
        except OSError:
            return False  # no locks there
        return True

    def knows(self, about: dict[str, Any]) -> None:
        """Raise ValueError where the folder holds a run of something else: before anything in it is changed."""
        if self.folder is not None:
            self.ranks.agreed(lambda: (self._compare(about), {}))

    def open(self, about: dict[str, Any]) -> None:
        """Begin, or go on with what was done: by all ranks. Raises ValueError where the folder holds a run of something
        else."""
        if self.folder is None:
            return
        self.ranks.agreed(lambda: (self._identify(about), {}))
        self.ranks.agreed(lambda: (None, {"finished blocks": digest(*sorted(self._read()))}))

    def _make(self) -> bool:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ValueError(f"resume must be a folder, and {self.folder} is a file: give another name") from None
        return True

    def _show(self, token: str) -> bool:
        assert self.folder is not None
        if self.ranks.rank == 0:
            _written(self.folder / "ranks.txt", token.encode())
        return True

    def _see(self, token: str) -> bool:
        """Raises ValueError where this is not the folder in which rank 0 wrote the token."""
        assert self.folder is not None
        path = self.folder / "ranks.txt"
        if not os.path.lexists(path) or _read(path) != token.encode():
            raise ValueError(f"{self.folder} is not the folder that rank 0 sees: give resume= one that all ranks see")
        return True

    def _identify(self, about: dict[str, Any]) -> bool:
        assert self.folder is not None
        if self.ranks.rank:  # ranks agree in what they run, so one looks
            return False
        if not self._compare(about):
            _written(self.folder / "stream.json", json.dumps(about, indent=1, sort_keys=True).encode())
        return True

    def _compare(self, about: dict[str, Any]) -> bool:
        """Whether the folder holds a run of this."""
        assert self.folder is not None
        path = self.folder / "stream.json"
        if self.ranks.rank or not os.path.lexists(path):
            return False
        with damaged(path):
            before, now = json.loads(_read(path)), json.loads(json.dumps(about))
            if not isinstance(before, dict):
                raise ValueError("it describes no run")
        differing = [name for name in sorted(now) if before.get(name) != now[name]]
        if differing:
            raise ValueError(
                f"{self.folder} holds a run that differs in {', '.join(differing)}: it cannot go on with another "
                "network, scene or budget. Give the same, or a new folder"
            )
        return True

    def _read(self) -> dict[str, str]:
        """Which blocks are done, by what every rank of any earlier run wrote, without half a line at an end."""
        assert self.folder is not None
        for log in sorted(self.folder.glob("done*.txt")):
            with damaged(log):
                lines = _read(log).decode("ascii").split("\n")[:-1]
                for line in lines:
                    if not DONE.fullmatch(line):
                        raise ValueError(f"{line[:40]!r} does not name a finished block")
                    task, _, found = line.partition(" ")
                    self._done[task] = found
            if log == self._log:
                _written(log, "".join(f"{line}\n" for line in lines).encode())
        return self._done

    @property
    def _log(self) -> Path:
        assert self.folder is not None
        return self.folder / f"done{self.ranks.rank or ''}.txt"

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An array (of any content) of this rank, in the folder where there is one."""
        return self._array(f"{name}{self.ranks.rank or ''}", shape, dtype, True)

    def shared(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """One array of all ranks, who call this together, in the folder where there is one; what was there stays."""
        with self.ranks.together():
            made = self._array(name, shape, dtype, True) if self.ranks.rank == 0 else None
        made = self._array(name, shape, dtype, False) if made is None else made
        self._names[made.data_ptr()] = name
        return made

    def _array(self, name: str, shape: Sequence[int], dtype: torch.dtype, makes: bool) -> torch.Tensor:
        if self.folder is None or 0 in shape:
            return in_memory(shape, dtype)
        path, kind = self.folder / f"{name}.npy", kind_of(dtype)
        if makes and not os.path.lexists(path):
            size, free = kind.itemsize * math.prod(shape), shutil.disk_usage(self.folder).free
            if size > free:  # a mapped page without room would end the process
                raise OSError(errno.ENOSPC, f"{size} bytes are needed and {free} are free", str(path))
            with written_whole(path) as part:
                np.lib.format.open_memmap(part, "w+", kind, tuple(shape))
        return torch.from_numpy(_mapped(path, "r+", kind, tuple(shape))).view(dtype)

    def kept(self, array: torch.Tensor) -> torch.Tensor:
        """A shared array as a result: of several ranks, each may write into it without the others' seeing that."""
        name = self._names.get(array.data_ptr())
        if self.ranks.size == 1 or self.folder is None or name is None or not array.numel():
            return array
        path, kind = self.folder / f"{name}.npy", kind_of(array.dtype)
        return torch.from_numpy(_mapped(path, "c", kind, tuple(array.shape))).view(array.dtype)

    def is_done(self, task: str) -> bool:
        return task in self._done

    def finish(self, task: str, left: Callable[[], str]) -> None:
        """A task's results are all kept; ``left`` is a digest of some of them."""
        found = ""
        if self.folder is not None:
            found = "" if self._is_made else left()
            with open_plain(self._log, "ab") as log:
                log.write(f"{task} {found}\n".encode())
        self._done[task] = found

    def check(self, phase: int, left: Callable[[int], str]) -> None:
        """Raise ValueError where rows are not those that the finished blocks of a phase have left."""
        for task, found in self._done.items():
            number, at = map(int, task.split("."))
            if number != phase or not found:
                continue
            with damaged(self._log):
                now = left(at)
            if now != found:
                raise ValueError(
                    f"the rows of finished blocks are missing from out: {self.folder} resumes only with the file of "
                    "before, opened with mode 'r+', which keeps its contents. Or start with a new folder"
                )

    def put(self, name: str, piece: Any) -> None:
        """Keep tensors, and tuples and lists of them."""
        if self.folder is None:
            self._pieces[name] = piece
            return
        with written_whole(self.folder / f"{name}.pt") as part:
            torch.save(piece, part)

    def get(self, name: str) -> Any:
        """What was kept; None for nothing, in memory."""
        if self.folder is None:
            return self._pieces.get(name)
        path = self.folder / f"{name}.pt"
        with damaged(path), open_plain(path, "rb") as file:
            check_archive(file, os.fstat(file.fileno()).st_size)
            file.seek(0)
            return torch.load(file, weights_only=True)


def kind_of(dtype: torch.dtype) -> np.dtype:
    """numpy's kind of numbers of so many bytes."""
    return NUMPY.get(dtype) or torch.empty(0, dtype=dtype).numpy().dtype


def in_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory of any content. numpy asks for large pages, which are there sooner."""
    return torch.from_numpy(np.empty(tuple(shape), kind_of(dtype))).view(dtype)


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """What is read of a file is none of what a run writes there: say so."""
    try:
        yield
    except Exception as error:  # readers of damaged files raise anything
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} cannot be resumed from: {error}. Give resume= a new folder") from error


def _mapped(path: Path, mode: Literal["r+", "c"], kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array in a file of numpy's, which must be of this kind and shape and as long as it says."""
    with damaged(path), open_plain(path, "r+b") as file:
        version = np.lib.format.read_magic(file)
        found, is_transposed, numbers = np.lib.format.read_array_header_1_0(file)
        size = file.tell() + kind.itemsize * math.prod(shape)
        if (version, found, is_transposed, numbers) != ((1, 0), shape, False, kind):
            raise ValueError(f"an array {shape} of {kind} should lie there; it is {found} of {numbers}")
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(f"it should have {size} bytes and has {os.fstat(file.fileno()).st_size}")
        return np.memmap(file, kind, mode, file.tell(), shape)


def _read(path: Path) -> bytes:
    with open_plain(path, "rb") as file:
        return file.read()


def _written(path: Path, data: bytes) -> None:
    """A file that is there as a whole or not at all."""
    with written_whole(path) as part:
        part.write_bytes(data)
