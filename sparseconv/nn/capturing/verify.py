"""A new recording is compared with the eager call on the scene at hand, results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.nn.capturing.answer import CannotCapture, Given
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene
from sparseconv.torch_private import allows_tf32

#: the part of its norm by which a result, and all gradients together, may differ: sums run in another order
RESULTS = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
GRADIENTS = {torch.float64: 1e-5, torch.float32: 5e-2, torch.float16: 2e-1, torch.bfloat16: 3e-1}


def against_eager(recording: Recording, call: Callable[..., Any], given: Given, scene: Scene) -> None:
    """Raise `CannotCapture` where a replay differs from the eager ``call`` by more than rounding."""
    with recording.state.restoring():
        recording.begin(scene, given)
        fault = recording.fault()
        if fault is not None:
            raise CannotCapture(f"the scene of the capture does not fit into it: {fault}")
        found = recording.taken_results()
        eager = recording.eager_call(call, given)
        _same_plain(recording, eager.answer.plain)
        wanted = [t.detach() for t in eager.answer.tensors]
        for number, (a, b) in enumerate(zip(found, wanted)):
            if a.shape != b.shape:
                raise CannotCapture(
                    f"result {number} has a size that depends on the scene: {tuple(a.shape)}, alone {tuple(b.shape)}"
                )
        off = _off(found, wanted, RESULTS)
        jitter = _rounding(scene.features)
        if (
            off is not None
            and _off([t.detach() for t in recording.eager_call(call, given, jitter).answer.tensors], wanted, RESULTS)
            is None
        ):
            raise CannotCapture(
                f"rows that are no voxels change its results ({off}): each row must be worked on alone, or by this "
                "library's modules and torch's batch norm"
            )
        if not recording.trains:
            return
        grads = [None] * len(found) if off is not None else _random(recording, wanted)
        if off is None:
            mine = recording.backward(grads)
            theirs = recording.gradients_of(eager, grads)
            off = _off_gradients(mine, theirs)
            if (
                off is not None
                and _off_gradients(recording.gradients_of(recording.eager_call(call, given, jitter), grads), theirs)
                is None
            ):
                raise CannotCapture(f"its gradients differ from the eager call's ({off})")


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


def _off(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], limits: dict[torch.dtype, float]) -> str | None:
    """The first difference that is more than rounding, in words."""
    for number, (a, b) in enumerate(zip(found, wanted)):
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"result {number} is another"
            continue
        a, b, limit = a.double(), b.double(), limits[b.dtype]
        gap = torch.where(a.isnan() & b.isnan(), 0.0, a - b)
        part = float(gap.norm() / b.nan_to_num().norm().clamp_min(1e-12)) if b.numel() else 0.0
        if not part <= limit:
            return f"result {number} by {part:.2g} of its norm"
    return None


Gradients = tuple[torch.Tensor | None, list[torch.Tensor | None]]


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
