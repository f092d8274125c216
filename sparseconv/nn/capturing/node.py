"""The one graph node that joins a replayed forward and its replayed backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparseconv.autograd_function import Function
from sparseconv.nn.capturing.answer import Given
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene, inside
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
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        recording, token = ctx.recording, ctx.token
        extra = [i for i, g in enumerate(grads) if g is not None and i not in recording.taken]
        was_asked, token.asked = token.asked, True
        if extra:
            token.taken = True
            of_features, of_parameters = ctx.again(grads)
        elif was_asked:
            raise RuntimeError(
                "the gradient of this captured call was taken before, and its graph's memory is used again: "
                "call the module once for each backward, or nn.release(module) to keep graphs with retain_graph=True"
            )
        else:
            of_features, of_parameters = recording.backward(grads)
            token.taken = True  # from here on another thread may replay
        return None, None, None, of_features, *of_parameters


def replayed(
    recording: Recording, captured: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], scene: Scene
) -> list[torch.Tensor]:
    """Results of the last replay with their gradient, for which the recording's memory is kept."""
    token, call = _Token(), captured.plain

    def again(grads: Any) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The gradients by an eager call: one of a result that had none when this was captured."""
        captured.forget(recording, grads)
        with recording.state.restoring(), inside():
            return gradients_of(recording, eager_call(recording, call, Given(*inputs)), grads)

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
