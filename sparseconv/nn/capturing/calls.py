"""Calls of one kind: what tells kinds apart, what was seen of them, and their recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch

from sparseconv.gpu import graphs
from sparseconv.nn.capturing.arrays import Lengths
from sparseconv.nn.capturing.reads import variables_ahead
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene
from sparseconv.nn.capturing.values.given import Given
from sparseconv.nn.capturing.values.telling import told

#: places over those of the largest scene so far, at first
ROOM = 1.125

#: refused calls in a mode, without a replay between them, after which calls in it are the plain calls
MOST_REFUSED = 8
#: arguments that differ which are named
MOST_NAMED = 4

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
    """Variables that the rest of a call may read, with what calls are told apart by; see `variables_ahead`.

    And what the call has written into its arguments so far, which a replay writes as it was.
    """
    found = chain(variables_ahead(end), given.written())
    return tuple((name, told(value, given.is_dict)) for name, value in found)


def differing(key: Any, others: Iterable[Any]) -> str:
    """That calls differ in what a graph would hold, in words."""
    keys = [other for other in others if isinstance(other, Key) and isinstance(key, Key)]
    names = sorted({n for other in keys if other.form == key.form for n, _ in {*other.variables} ^ {*key.variables}})
    forms = [{*other.form[-1]} ^ {*key.form[-1]} for other in keys if other.form[:-1] == key.form[:-1]]
    places = sorted({".".join(map(str, path[1:])) for form in forms for path, *_ in form})
    what = f"variables {', '.join(names)}" if names else f"arguments {', '.join(places[:MOST_NAMED])}".rstrip()
    return (
        f"its {what} are others in every call, and a graph holds them as they were: find such values within the call, "
        "before it makes its scene, or capture its parts"
    )


class Refusals:
    """Calls that were refused since the last replay, by mode (training, with gradients)."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, bool]] = Counter()
        #: why calls in a mode are the plain calls now
        self.left: dict[tuple[bool, bool], str] = {}

    def add(self, mode: tuple[bool, bool], why: str) -> None:
        self._counts[mode] += 1
        if self._counts[mode] == MOST_REFUSED:
            self.left[mode] = why

    def clear(self) -> None:
        self._counts.clear()


class Calls:
    """Calls of one kind: modes, dtypes, batch size. What was seen of them, and their recording."""

    def __init__(self) -> None:
        self.calls = 0
        self.scenes: list[Scene] = []
        self.lengths = Lengths()
        self.wanted: set[int] = set()
        self.recording: Recording | None = None
        #: whether their sparse tensor is held by an object among the arguments
        self.is_opened = False
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
