"""Calls of one kind: what tells kinds apart, what was seen of them, their recording, and what happens before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch

from sparseconv.gpu import graphs
from sparseconv.nn.capturing.answer import Given
from sparseconv.nn.capturing.arrays import Lengths
from sparseconv.nn.capturing.module_state import HeldTensor, copied, is_same, modules_of_clients, own_of, restored
from sparseconv.nn.capturing.reads import told, variables_ahead
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene

#: places over those of the largest scene so far, at first
ROOM = 1.125
#: eager calls of a kind before the first capture, and of a mode in which all that may move before a region is compared
EXAMPLES = 2

_trains = attrgetter("training")


class Key(NamedTuple):
    """What calls must have in common to be replays of one recording."""

    form: tuple[Any, ...]
    #: where the call makes its scene, by name: variables that the rest of the call may read
    variables: tuple[tuple[str, Any], ...] = ()
    #: and what else its graph reads; see `Reads`
    reads: tuple[Any, ...] = ()


def modes() -> tuple[Any, ...]:
    """Whether gradients are wanted, and the dtype of autocast by device."""
    kinds = ("cuda", "cpu")
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds)


def key_of(scene: Scene, given: Given, path: Any, modules: Sequence[torch.nn.Module], outer: tuple[Any, ...]) -> Key:
    """Of a call with a sparse tensor at ``path`` among its arguments; where it is None, of a call that makes its scene,
    without what the rest of that call may read. ``outer`` are the modes around the call, which may have others where it
    begins."""
    grad = torch.is_grad_enabled()
    arguments = () if path is None else given.forms(len(scene.coords), scene.features.device)
    form = (
        tuple(map(_trains, modules)),
        *(outer, modes(), scene.batch_size, scene.coords.shape[1], scene.voxel_size, scene.origin),
        *(scene.features.dtype, scene.features.shape[1], scene.features.device),
        *(grad and scene.features.requires_grad, torch.backends.cuda.matmul.allow_tf32, arguments),
    )
    return Key(form)


def variables_of(given: Given, end: CodeType) -> tuple[tuple[str, Any], ...]:
    """Variables that the rest of a call may read, with what calls are told apart by; see `variables_ahead`."""
    return tuple((name, told(value, given.is_dict)) for name, value in variables_ahead(end))


def differing(key: Any, others: Iterable[Any]) -> str:
    """That calls differ in what a graph would hold, in words."""
    keys = [other for other in others if isinstance(other, Key) and isinstance(key, Key) and other.form == key.form]
    names = sorted({name for other in keys for name, _ in {*other.variables} ^ {*key.variables}})
    what = f"variables {', '.join(names)}" if names else "arguments"
    return (
        f"its {what} are others in every call, and a graph holds them as they were: find such values within the call, "
        "before it makes its scene, or capture its parts"
    )


class Calls:
    """Calls of one kind: modes, dtypes, batch size. What was seen of them, and their recording."""

    def __init__(self) -> None:
        self.calls = 0
        self.scenes: list[Scene] = []
        self.lengths = Lengths()
        self.wanted: set[int] = set()
        self.recording: Recording | None = None
        self.is_alone = False  # another kind's gradient is awaited when this one is called: their memory is not shared
        self.room = ROOM
        self.captures = 0
        self.replays = 0
        self.refused: str | None = None

    def saw(self, scene: Scene, given: Given, path: Any, before: int) -> None:
        """Remember a call among the examples, of which so many before it are kept."""
        self.scenes = [*self.scenes[-before:], scene.without_features()]
        self.lengths = self.lengths.of_call(scene, given, path)

    def forget(self) -> None:
        """Let go of a recording that scenes did not outgrow."""
        if self.recording is not None:
            self.recording = None
            self.captures -= 1

    def lines(self) -> Iterator[str]:
        """What is captured of them, or why nothing is."""
        if self.recording is not None:
            sizes = self.recording.sizes
            what = "forward and backward" if self.recording.trains else "forward"
            yield (
                f"{what} in graphs for up to {sizes.rows:,} voxels within {sizes.extent}: {self.replays:,} replays, "
                f"captured {self.captures} times"
            )
        elif self.refused is not None:
            yield f"eager: {self.refused}"


class Begins(BaseException):
    """Ends a call where its region begins: what follows is replayed."""


class Instead(NamedTuple):
    """A call that is no replay, and why, where that is not counted yet."""

    why: str | None


class Ahead:
    """What calls move before their regions begin: buffers, such as a norm's, and attributes of modules of clients."""

    def __init__(self) -> None:
        #: by mode: calls that were compared; names of parts, and of what is theirs, that a call moved
        self.compared: Counter[Any] = Counter()
        self.moved: dict[Any, set[tuple[str, str]]] = {}


class Before:
    """What a call may move before its region begins, as it was: a call that no replay answers is made anew from there.

    The first calls of a mode show what that is; others keep that alone.
    """

    def __init__(self, ahead: Ahead, module: torch.nn.Module, mode: Any) -> None:
        self._ahead, self._mode = ahead, mode
        self._is_compared = ahead.compared[mode] < EXAMPLES
        #: part, name, what holds it, and a copy of it
        self._kept: list[tuple[str, str, dict[str, Any], Any]] = []
        if self._is_compared:
            clients = set(modules_of_clients(module))
            for part, m in module.named_modules():
                names = [*m._buffers, *(name for name, _ in own_of(m) if m in clients)]
                self._keep(part, m, names)
        else:
            for part, name in ahead.moved.get(mode, ()):
                self._keep(part, module.get_submodule(part), [name])

    def _keep(self, part: str, m: torch.nn.Module, names: Iterable[str]) -> None:
        for name in names:
            held: dict[str, Any] = m._buffers if name in m._buffers else m.__dict__
            if name in held:
                self._kept.append((part, name, held, copied(held[name])))

    def compare(self) -> None:
        """The region begins: learn what is another now."""
        if not self._is_compared:
            return
        self._ahead.compared[self._mode] += 1
        moved = {(part, name) for part, name, held, copy in self._kept if _is_moved(held.get(name), copy)}
        self._ahead.moved.setdefault(self._mode, set()).update(moved)

    def put_back(self) -> None:
        """Make it what it was."""
        for _, name, held, copy in self._kept:
            held[name] = restored(held.get(name), copy)


def _is_moved(now: Any, copy: Any) -> bool:
    """By values, too: torch's batch norm writes its statistics without a version."""
    return not is_same(now, copy) or (isinstance(copy, HeldTensor) and not torch.equal(copy.itself, copy.values))


def explained(module: torch.nn.Module, kinds: Sequence[Calls], eager: Counter[str]) -> str:
    """What is captured of a module, how often it was replayed, what memory it holds, and why other calls were eager."""
    lines = [f"{type(module).__name__}:"]
    lines += [f"  {said}" for kind in kinds for said in kind.lines()]
    memories = dict.fromkeys(kind.recording.memory for kind in kinds if kind.recording is not None)
    lines += [f"  graphs hold {memory.held_bytes() / 2**20:,.0f} MiB" for memory in memories]
    lines += [f"  {count:,} eager calls: {why}" for why, count in eager.most_common()]
    if len(lines) == 1:
        devices = {t.device for t in chain(module.parameters(), module.buffers())}
        on = " and ".join(sorted(str(device) for device in devices if not graphs.has_graphs(device)))
        lines.append(f"  on {on}: calls run as they are, graphs need an NVIDIA GPU" if on else "  not called yet")
    return "\n".join(lines)
