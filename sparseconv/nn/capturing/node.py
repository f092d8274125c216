"""The one graph node that joins a replayed forward and its replayed backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sparseconv.autograd_function import Function
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene, inside
from sparseconv.nn.capturing.values.given import Given
from sparseconv.nn.capturing.verify import eager_call, gradients_of
from sparseconv.torch_private import unwrap_dead


class _Token:
    """Lives as long as somebody may still ask for the gradient of a call."""

    def __init__(self) -> None:
        #: whether somebody asked, and whether the answer is there, or will be before what is launched next
        self.asked = self.taken = False


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, token: _Token, again: Any, features: Any, *parameters: Any) -> Any:
        results = recording.taken_results()
        ctx.recording, ctx.token, ctx.again = recording, token, again
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(results) if i not in recording.differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        recording, token = ctx.recording, ctx.token
        extra = any(g is not None and i not in recording.taken for i, g in enumerate(grads))
        was_asked, token.asked = token.asked, True
        if extra or was_asked or torch.is_grad_enabled():
            token.taken = True
            of_features, of_parameters = ctx.again(grads, was_asked)
        else:
            of_features, of_parameters = recording.backward(grads)
            token.taken = True  # from here on another thread may replay
        return None, None, None, of_features, *of_parameters


def replayed(
    recording: Recording, captured: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], scene: Scene
) -> list[torch.Tensor]:
    """Results of the last replay with their gradient, for which the recording's memory is kept."""
    token, call = _Token(), captured.plain
    versions = [p._version for p in recording.parameters]

    def again(grads: Any, was_asked: bool) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The gradients by an eager call: of a result that had none when this was captured, asked for once more, or
        to be differentiated."""
        twice = torch.is_grad_enabled()
        if twice or was_asked:
            why = "its gradients are differentiated" if twice else "its gradient is asked for more than once"
            if recording.state.draws or versions != [p._version for p in recording.parameters]:
                what = "draws random numbers" if recording.state.draws else "has other weights now"
                raise RuntimeError(
                    f"{why}, for which a captured call is made again eagerly, but it {what}: call the module once for "
                    "each backward, or nn.release(module)"
                )
            captured.leave(recording, why)
        else:
            captured.forget(recording, grads)
        with recording.state.restoring(), inside():
            eager = eager_call(recording, call, Given(*inputs, captured.parts.settings.objects), attached=twice)
            return gradients_of(recording, eager, grads, twice)

    features = scene.features if unwrap_dead is None else unwrap_dead(scene.features)
    tensors: list[torch.Tensor] = _apply(recording, token, again, features, *recording.parameters)
    seen = weakref.ref(token)

    def is_pending() -> bool:
        alive = seen()
        return alive is not None and not alive.taken

    recording.memory.wait_for(recording, is_pending)
    return tensors


_node: Any = _Replayed
#: Function.apply without its look for functional transforms, in which no call is a replay
_apply: Any = super(torch.autograd.Function, _node).apply
