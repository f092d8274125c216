"""The eager call of what is recorded; a new recording is compared with it on the scene at hand, gradients too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sparseconv.nn.capturing.answer import Answer
from sparseconv.nn.capturing.module_state import without_traces
from sparseconv.nn.capturing.padding import APART, off, result_limit
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene, inside, kind_of, watched
from sparseconv.nn.capturing.values.given import CannotCapture, DoesNotFit, Given
from sparseconv.ops.comparing import gap_of
from sparseconv.torch_private import allows_tf32

#: the part of their norm by which all gradients together may differ: sums run in another order
GRADIENTS = {torch.float64: 1e-5, torch.float32: 5e-2, torch.float16: 2e-1, torch.bfloat16: 3e-1}
#: times the rounding, and the difference in the scene of the capture, by which results for another scene may differ;
#: and times the difference of two eager calls, which may draw random numbers, by which buffers may
TIMES = 16
OTHER = "its results for another scene differ ({}): a graph holds numbers that were made before it"

Gradients = tuple[torch.Tensor | None, list[torch.Tensor | None]]


class Eager(NamedTuple):
    """A call without a graph, and the features that it began with."""

    answer: Answer
    features: torch.Tensor


def eager_call(
    recording: Recording, call: Callable[..., Any], given: Given, jitter: float = 0.0, *, attached: bool = False
) -> Eager:
    """The module's own forward on ordinary grids, from features of its own, moved by a part of each at random.

    ``attached``: from an alias of the features, through which derivatives of its gradients go on.
    """
    starts: list[torch.Tensor] = []

    def start(x: Any, in_place: bool = False) -> Any:
        kind = kind_of(x)
        assert kind is not None
        features = kind.read(x).features
        if attached:
            starts.append(features.view_as(features))
        else:
            moved = features.detach()
            moved = moved * torch.empty_like(moved).uniform_(1 - jitter, 1 + jitter) if jitter else moved
            starts.append(moved.detach().requires_grad_(recording.of_features and torch.is_grad_enabled()))
        return kind.fill(x if in_place else kind.copy(x), kind.grid(x), starts[0], None)

    with torch.set_grad_enabled(recording.trains):
        if recording.path is None:
            args, kwargs = given.copied()
            with watched(lambda x: start(x, in_place=True) is not None):
                out = call(*args, **kwargs)
        else:
            args, kwargs = given.copied({recording.path: start(given.at(recording.path))})
            out = call(*args, **kwargs)
        return Eager(Answer(out, given, None, recording.state.constants), starts[0])


def gradients_of(
    recording: Recording, eager: Eager, grads: Sequence[torch.Tensor | None], create_graph: bool = False
) -> Gradients:
    """Gradients of the features and the parameters of an eager call, as `Recording.backward` gives them."""
    ends = [(t, g) for t, g in zip(eager.answer.tensors, grads) if g is not None and t.requires_grad]
    starts = ([eager.features] if recording.of_features else []) + recording.parameters
    found: list[torch.Tensor | None]
    options = {"allow_unused": True, "create_graph": create_graph}
    found = list(torch.autograd.grad([t for t, _ in ends], starts, [g for _, g in ends], **options))
    return (found.pop(0) if recording.of_features else None), found


def against_eager(recording: Recording, call: Callable[..., Any], given: Given, scene: Scene) -> None:
    """Raise `CannotCapture` where a replay differs from the eager ``call`` by more than rounding, and `DoesNotFit`.

    Results, gradients, and what is left in buffers that the graph moves are compared. The eager call moves others, too:
    those of what comes before the graph.
    """
    with recording.state.restoring() as put_back:
        before = recording.state.buffers_now()
        recording.begin(scene, given)
        fault = recording.fault()
        if fault is not None:
            raise DoesNotFit(fault)
        found, after = recording.taken_results(), recording.state.buffers_now()
        moved = {name: b for name, b in after.items() if not torch.equal(b, before[name])}
        put_back()
        with recording.state.counting():
            eager = eager_call(recording, call, given)
        _same_plain(recording, eager.answer.plain)
        wanted, left = [t.detach() for t in eager.answer.tensors], recording.state.buffers_now(moved)
        for number, (a, b) in enumerate(zip(found, wanted)):
            if a.shape != b.shape:
                raise CannotCapture(
                    f"result {number} has a size that depends on the scene: {tuple(a.shape)}, alone {tuple(b.shape)}"
                )
        gaps, jitter = list(map(gap_of, found, wanted)), _rounding(scene.features)
        limits, is_first = list(map(result_limit, wanted)), recording.gaps is None
        of_buffers = [max([result_limit(b), *limits]) if b.is_floating_point() else 0.0 for b in left.values()]
        if recording.gaps is None:
            recording.gaps = gaps
        else:
            limits = [min(most, TIMES * max(gap, jitter)) for most, gap in zip(limits, recording.gaps)]
        gap, gaps_left = off(gaps, limits), list(map(gap_of, moved.values(), left.values()))
        if gap is not None or off(gaps_left, of_buffers) is not None:
            put_back()
            again = eager_call(recording, call, given, jitter).answer.tensors
            left_again = list(map(gap_of, recording.state.buffers_now(moved).values(), left.values()))
            what = gap if off(list(map(gap_of, again, wanted)), limits) is None else None
            if what is None:
                clear = [gap if gap > TIMES * now else 0.0 for gap, now in zip(gaps_left, left_again)]
                what = off(clear, of_buffers, list(left))
            if what is not None:
                raise CannotCapture((APART if is_first else OTHER).format(what))
        if not recording.trains:
            return
        grads = [None] * len(found) if gap is not None else _random(recording, wanted)
        if gap is None:
            mine = recording.backward(grads)
            theirs = gradients_of(recording, eager, grads)
            gap = _off_gradients(mine, theirs)
            if (
                gap is not None
                and _off_gradients(gradients_of(recording, eager_call(recording, call, given, jitter), grads), theirs)
                is None
            ):
                raise CannotCapture(f"its gradients differ from the eager call's ({gap})")


def against_another(
    recording: Recording, module: torch.nn.Module, call: Callable[..., Any], given: Given, scene: Scene
) -> str | None:
    """Compare a replay for another scene than that of the capture with the eager call; why they differ, else None.

    What Python made of a scene before its graph began shows there, where nothing else told of it.
    """
    try:
        with inside(), without_traces(module):
            against_eager(recording, call, given, scene)
    except DoesNotFit:
        return None
    except CannotCapture as error:
        return str(error)
    recording.is_compared = True
    return None


def _rounding(features: torch.Tensor) -> float:
    """The rounding of what the network computes in: a graph sums in another order, and a deep network enlarges that.

    What the network makes of features that are moved by so much says how far two right answers lie apart.
    """
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        return torch.finfo(torch.get_autocast_dtype(kind)).eps
    if features.dtype == torch.float32 and features.is_cuda and allows_tf32():
        return 2.0**-11
    return torch.finfo(features.dtype).eps


def _same_plain(recording: Recording, eager: Sequence[Any]) -> None:
    captured = recording.answer.plain
    if len(captured) != len(eager) or any(a != b for a, b in zip(captured, eager)):
        raise CannotCapture(f"it returns values that depend on the scene: {list(eager)[:8]}, captured {captured[:8]}")


def _random(recording: Recording, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [torch.randn_like(t) if i in recording.taken else None for i, t in enumerate(like)]


def _off_gradients(mine: Gradients, theirs: Gradients) -> str | None:
    """All gradients together; one whose true value is zero is noise alone."""
    pairs = [(a, b) for a, b in zip((mine[0], *mine[1]), (theirs[0], *theirs[1])) if a is not None or b is not None]
    if any((a is None) != (b is None) for a, b in pairs):
        one = next(i for i, (a, b) in enumerate(pairs) if (a is None) != (b is None))
        return f"gradient {one} is missing"
    gap = wanted = 0.0
    limit = 0.0
    for a, b in pairs:
        if a is not None and b is not None:
            gap += float((a.double() - b.double()).square().sum())
            wanted += float(b.double().square().sum())
            limit = max(limit, GRADIENTS[b.dtype])
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        limit = max(limit, GRADIENTS[torch.float16])
    part = (gap / max(wanted, 1e-30)) ** 0.5
    return None if part <= limit else f"{part:.2g} of their norm"
