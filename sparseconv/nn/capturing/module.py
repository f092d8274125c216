"""A module whose calls replay graphs: the same module, called as before, for scenes of any size."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.gpu import graphs
from sparseconv.gpu.stream_mutex import StreamMutex
from sparseconv.nn.capturing import calls, verify
from sparseconv.nn.capturing.answer import Answer
from sparseconv.nn.capturing.arrays import Sizes
from sparseconv.nn.capturing.calls import Begins, Calls, Instead, Refusals, explained, modes
from sparseconv.nn.capturing.module_state import WANTS, ModuleParts, moving_in, without_traces
from sparseconv.nn.capturing.node import replayed
from sparseconv.nn.capturing.reads import Reads
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene, inside, is_inside, kind_of, never_begins, watched
from sparseconv.nn.capturing.shared_memory import LOOSE, SharedMemory
from sparseconv.nn.capturing.values.before import EXAMPLES, Ahead, Before
from sparseconv.nn.capturing.values.given import CannotCapture, DoesNotFit, Given
from sparseconv.torch_private import others_save

_log = logging.getLogger(__name__)

#: recordings that a module keeps; captures of one kind in all; kinds
MOST_KEPT, MOST_CAPTURES, MOST_KINDS = 8, 8, 16
#: places over those before, after each scene that did not fit; rows are then rounded up
MORE_ROOM = 1.25


class Captured:
    """The forward of a captured module. `explain` says what it does."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._begin(module, None, module.__dict__.get("forward"))

    def _begin(
        self, module: torch.nn.Module, instead: Callable[[Captured], None] | None, own: Callable[..., Any] | None = None
    ) -> None:
        #: the module holds this, and this the module weakly: graphs go with the last who holds the module
        self._module = weakref.ref(module)
        #: a forward of the module's own, where it is not that of its class
        self._plain: Callable[..., Any] | None = own
        self._kinds: dict[Any, Calls] = {}
        #: keys of calls whose arguments cannot have rows to spare, as one that is broadcast: their lengths count, too
        self._by_lengths: set[Any] = set()
        #: what graphs read of what calls make before them
        self._reads = Reads()
        #: what calls move before their graphs
        self._ahead = Ahead()
        self.eager: Counter[str] = Counter()
        #: calls refused of late; whether calls begin with the sparse tensor of an object among the arguments
        self._refusals, self._opens = Refusals(), True
        #: what `accelerate` does where nothing of the call can be captured
        self.instead = instead
        #: what graphs depend on; looked at when the module is called
        self._parts: ModuleParts | None = None
        #: what recordings are made in and gradients are awaited in; whose turn it is to replay or record
        self._memory, self._turns = SharedMemory(), StreamMutex()

    @property
    def module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the module of this captured forward is gone: keep the module, not its forward alone")
        return module

    @property
    def parts(self) -> ModuleParts:
        assert self._parts is not None
        return self._parts

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that is captured."""
        forward: Callable[..., Any] = self._plain or type(self.module).forward.__get__(self.module)
        return forward

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled module is captured anew."""
        return {"module": self.module, "instead": self.instead}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(**state)  # the module may not be whole yet: its parts are looked at when it is called

    def _collect(self) -> None:
        self._parts = ModuleParts(self.module)
        for kind, _ in self._recordings():  # of what the module was
            kind.recording = None
        self._memory = SharedMemory()

    # ---- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._refusals.left and (why := self._refusals.left.get(self._mode())) is not None:
            return self._eagerly(why, args, kwargs)
        if self._parts is None:
            self._collect()
        if self._must_be_plain():
            return self.plain(*args, **kwargs)
        if torch.is_grad_enabled() and others_save():
            why = "within torch.utils.checkpoint, or another that decides what gradients keep"
            return self._eagerly(why, args, kwargs)
        given, outer = Given(args, kwargs, self.parts.settings.objects), modes()
        direct = given.scenes(self._opens)
        if len(direct) > 1:
            self._count_refusal("several sparse tensors in one call")
            return self.plain(*args, **kwargs)
        if direct:
            path, x = direct[0]
            kind, scene = self._kind(x, given, path, outer)
            if self._is_ready(kind, scene):
                return self._replay(kind, scene, path, given)
            given.keep(kind.calls < EXAMPLES)
            with self.parts.settings.of_calls():
                out = self.plain(*args, **kwargs)
            return self._noted(kind, scene, out, given, path)
        found, before = list[tuple[Calls, Scene]](), Before(self._ahead, self.module, self._mode(), given)

        def begin(x: Any) -> bool:
            found.append(self._kind(x, given, None, outer))
            if why := before.compare():
                self._refuse(found[0][0], why)
            if self._is_ready(*found[0]):
                raise Begins
            return False

        out = begins = object()
        with suppress(Begins), self.parts.settings.of_calls(), watched(begin):
            out = self.plain(*args, **kwargs)
        if out is begins:  # here, since an error within the handling of another one would be told as that one
            given.put_back()  # what follows starts anew
            return self._replay(*found[0], None, given, before)
        if found:
            return self._noted(*found[0], out, given, None)
        refused = (kind.refused for kind in self._kinds.values() if kind.refused)
        self._count_refusal(next(refused, "no sparse tensor was made, but for those of captured parts"))
        return out

    def _must_be_plain(self) -> bool:
        return (
            torch.compiler.is_compiling()
            or is_inside()
            or transforms.active()
            or not self.parts.has_graphs()
            or graphs.is_capturing()
        )

    def _mode(self) -> tuple[bool, bool]:
        return self.module.training, torch.is_grad_enabled()

    def _eagerly(self, why: str, args: Any, kwargs: Any) -> Any:
        self.eager[why] += 1
        return self.plain(*args, **kwargs)

    def _kind(self, x: Any, given: Given, path: Any, outer: tuple[Any, ...]) -> tuple[Calls, Scene]:
        reader = kind_of(x)
        assert reader is not None
        scene = reader.read(x)
        key: Any = calls.key_of(scene, given, path, (self.module, *self.parts.modules), outer)
        if path is None:
            variables = calls.variables_of(given, Captured.__call__.__code__)
            key = key._replace(variables=variables, reads=self._reads.told(given.entry))
        if key in self._by_lengths:
            key = key, given.lengths(len(scene.coords), scene.features.device)
        kind = self._kinds.get(key) or Calls()
        kind.is_opened = path is not None and given.is_within_object(path)
        if key not in self._kinds and len(self._kinds) < MOST_KINDS:
            self._kinds[key] = kind
        elif key not in self._kinds:
            kind.refused = self._refuse(kind, calls.differing(key, self._kinds))
        return kind, scene

    def _is_ready(self, kind: Calls, scene: Scene) -> bool:
        """Whether a call can be a replay, now or once it was captured; else why not is counted."""
        if kind.refused is not None:
            self._count_refusal(kind.refused)
            return False
        if len(scene.coords) == 0:
            self.eager["a scene without voxels"] += 1
            return False
        if kind.calls < EXAMPLES:
            self.eager["the first calls, which are the example"] += 1
            return False
        if (hooked := self.parts.hooked()) is not None:
            self.eager[f"a hook on {type(hooked).__name__}, which a graph would not call"] += 1
            return False
        if kind.recording is None and (why := moving_in(self.module)) is not None:
            self._count_refusal(self._refuse(kind, why))
            return False
        return True

    def _noted(self, kind: Calls, scene: Scene, out: Any, given: Given, path: Any) -> Any:
        """The results of an eager call, remembered with its scene: which of them get gradients of the caller's.

        Their tensors become aliases, since the call itself may go on from a result that the caller ignores.
        """
        kind.calls += 1
        if kind.refused is not None or not len(scene.coords):
            return out
        kind.saw(scene, given, path, 1)
        try:
            answer = Answer(out, given, None, {})
        except CannotCapture as error:
            self._refuse(kind, str(error))
            return out
        if not self.parts.trains() and not scene.features.requires_grad and any(map(WANTS, answer.tensors)):
            self._refuse(kind, LOOSE)
        aliases = [t.view_as(t) if t.requires_grad else t for t in answer.tensors]
        for number, alias in enumerate(aliases):
            if alias.requires_grad:
                alias.register_hook(lambda grad, number=number: kind.wanted.add(number))
        return answer.aliased(given, aliases)

    def _refuse(self, kind: Calls, why: str) -> str:
        """Keep calls of a kind eager, and capture the module's parts instead; or look for another beginning."""
        if kind.is_opened:
            self._opens, self._kinds = False, {}
            return why
        kind.refused = why
        if self.instead is not None:
            self.instead(self)
            self.instead = None
        return why

    def _count_refusal(self, why: str) -> None:
        self.eager[why] += 1
        self._refusals.add(self._mode(), why)

    # ---- recordings

    def _replay(self, kind: Calls, scene: Scene, path: Any, given: Given, before: Before | None = None) -> Any:
        never_begins()
        with self._turns.on(scene.features.device):
            result = self._replay_alone(kind, scene, path, given)
        if not isinstance(result, Instead):
            return result
        if before is not None:
            before.put_back()
        args, kwargs = given.whole
        return self.plain(*args, **kwargs) if result.why is None else self._eagerly(result.why, args, kwargs)

    def _replay_alone(self, kind: Calls, scene: Scene, path: Any, given: Given) -> Any:
        before = kind.recording
        why = self._prepare(kind, scene, path, given)
        recording = kind.recording
        if why is not None or recording is None:
            return Instead(why or "nothing is captured")
        is_new = recording is before and not (recording.is_compared or self.parts.is_changed())
        if is_new and (why := verify.against_another(recording, self.module, self.plain, given, scene)) is not None:
            kind.recording = None
            return Instead(self._refuse(kind, why))
        recording.begin(scene, given)
        if self.parts.is_changed():  # looked at while the device works
            recording.abandon()
            self._collect()
            is_ready = self._is_ready(kind, scene)
            return self._replay_alone(kind, scene, path, given) if is_ready else Instead(None)
        if (why := recording.fault()) is not None:
            kind.room *= MORE_ROOM
            self._outgrown(kind, scene, given, path)
            return Instead(why)
        kind.replays += 1
        self._refusals.clear()
        if recording.trains:
            inputs = given.copied()  # containers that the results are not put into: no circle holds them
            tensors = replayed(recording, self, inputs, scene)
        else:
            tensors = recording.taken_results()
        return recording.answer.filled(given, tensors, recording.grids(), scene.shape, path)

    def _prepare(self, kind: Calls, scene: Scene, path: Any, given: Given) -> str | None:
        """A recording that has places for the scene; else why there is none."""
        if self.parts.is_moved() or (kind.recording is None and self.parts.is_changed()):
            self._collect()
        if kind.recording is not None:
            if kind.recording.memory.is_pending:
                return self._disturbed(kind, kind.recording)
            why = kind.recording.sizes.lack(scene) or kind.recording.arrays.lack(given)
            if why is not None:
                self._outgrown(kind, scene, given, path)
            return why
        if kind.captures >= MOST_CAPTURES:
            return self._refuse(kind, f"its scenes or changes outgrew {MOST_CAPTURES} captures, one after another")
        kind.captures += 1
        try:
            with inside(), without_traces(self.module):
                kind.recording = self._record(kind, scene, path, given)
        except CannotCapture as error:
            if any(kind.lengths.of_call(scene, given, path).varies):
                self._by_lengths |= {key for key, known in self._kinds.items() if known is kind}
                self._kinds = {key: known for key, known in self._kinds.items() if known is not kind}
                return f"arguments of other lengths: {error}"
            return self._refuse(kind, str(error))
        self._learn(kind, given)
        self._forget_old(kind)
        return None

    def _learn(self, kind: Calls, given: Given) -> None:
        """Tell calls apart by what a new recording reads, too; other kinds of calls are captured anew."""
        assert kind.recording is not None
        if not kind.recording.reads <= self._reads:
            self._reads.add(kind.recording.reads)
            key = next(key for key, known in self._kinds.items() if known is kind)
            self._kinds = {key._replace(reads=self._reads.told(given.entry)): kind}

    def _disturbed(self, kind: Calls, recording: Recording) -> str:
        """A call that comes before a gradient in the memory of its graphs was taken."""
        if not recording.memory.awaits(recording):
            kind.is_alone = True
            kind.forget()
        return "the gradient of the call before is not taken yet"

    def _memory_of(self, kind: Calls, places: int) -> SharedMemory:
        """That of the other recordings, which are made anew in it later where they have fewer ``places``."""
        if kind.is_alone or self._memory.is_pending:
            return SharedMemory()
        others = [(k, r) for k, r in self._recordings() if r.memory is self._memory]
        if max((r.sizes.places(r.trains) for _, r in others), default=0) < places:
            for other, _ in others:
                other.forget()
            self._memory = SharedMemory()
        return self._memory

    def _record(self, kind: Calls, scene: Scene, path: Any, given: Given) -> Recording:
        grad = torch.is_grad_enabled()
        parameters = [p for p in self.module.parameters() if p.requires_grad] if grad else []
        example = scene._replace(features=scene.features.detach().requires_grad_(grad and scene.features.requires_grad))
        trains = bool(parameters) or example.features.requires_grad
        for attempt in range(4):
            sizes = Sizes.of([*kind.scenes, scene], kind.room, is_first=kind.captures == 1)
            memory = self._memory_of(kind, sizes.places(trains))
            try:
                what = self.plain, self.module, given, path, example, sizes, kind.lengths.of_call(scene, given, path)
                recording = RECORDING(*what, parameters, kind.wanted, memory)
                recording.record(scene)
                verify.against_eager(recording, self.plain, given, scene)
                recording.tried()
            except DoesNotFit as error:
                kind.room *= MORE_ROOM
                if attempt == 3:
                    raise CannotCapture(f"places four times larger did not hold the scene: {error}") from None
            except CannotCapture:
                raise
            except Exception as error:
                _log.debug("a call could not be captured", exc_info=True)
                raise CannotCapture.told(error.__context__ or error) from error
            else:
                return recording
        raise AssertionError

    def forget(self, recording: Recording, grads: Sequence[Any]) -> None:
        """Let go of a recording whose results got gradients that it does not take; the next one takes these too."""
        for kind, its in self._recordings():
            if its is recording:
                kind.recording = None
                kind.wanted |= {i for i, g in enumerate(grads) if g is not None}
                self.eager["a result got a gradient that it had not before"] += 1

    def leave(self, recording: Recording, why: str) -> None:
        """Keep calls of the recording's kind eager from here on."""
        for kind, its in self._recordings():
            if its is recording:
                kind.recording = None
                self._refuse(kind, why)

    def _outgrown(self, kind: Calls, scene: Scene, given: Given, path: Any) -> None:
        """Make room: the next call captures again, with this scene among the examples."""
        kind.recording = None
        kind.saw(scene, given, path, 2)

    def _forget_old(self, kind: Calls) -> None:
        """Keep a few recordings, the ones used last."""
        for key, known in list(self._kinds.items()):
            if known is kind:
                self._kinds[key] = self._kinds.pop(key)
        for k, _ in self._recordings()[:-MOST_KEPT]:
            k.recording = None

    def _recordings(self) -> list[tuple[Calls, Recording]]:
        """By kind, the one used last at the end; another thread may add kinds meanwhile."""
        return [(k, k.recording) for k in list(self._kinds.values()) if k.recording is not None]

    # ---- words

    def explain(self) -> str:
        """What is captured, how often it was replayed, what memory it holds, and why other calls were eager."""
        return explained(self.module, list(self._kinds.values()), self.eager)


#: what records calls; tests without a card put a stand-in here
RECORDING: type[Recording] = Recording
