"""A compiled program as one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from sparseconv.compiler.operators import handle, own_of
from sparseconv.compiler.program import Program
from sparseconv.torch_private import any_autocast, functional, graph_results, no_autocast, others_save


class NotPlain(Exception):
    """Results that share memory with other tensors, for which autograd needs more than one node."""


class Compiled:
    """What Dynamo calls: a program, and its derivatives where it was traced with them.

    Args:
        program: the forward graph and, where gradients are wanted, the backward graph.
        graph_module: what Dynamo traced. Gradients of gradients are those of its operations, run once more.
        metadata: what AOTAutograd found out about inputs and results.

    Raises:
        NotPlain: a result is a view of an argument or of another result, or an argument that has gradients is
            written to.
    """

    def __init__(self, program: Program, graph_module: GraphModule, metadata: Any) -> None:
        self.program, self.graph_module = program, graph_module
        found = graph_results(metadata)
        if isinstance(found, str):
            raise NotPlain(found)
        #: by result: the argument that it is, if it is one; whether it has gradients
        self.arguments, self.has_gradient = found
        self.takes_gradient = [i for i, info in enumerate(metadata.input_info) if info.requires_grad]
        self.aliases = [(i, at) for i, at in enumerate(self.arguments) if at is not None]

    def __call__(self, *args: Any) -> Any:
        if self.program.backward is None:
            with torch.no_grad():
                results = self.run(args)[0]
        else:
            apply = _Node.apply if functional() else _apply
            results = apply(self, args, *[args[i] for i in self.takes_gradient])
        if self.aliases:
            results = list(results)
            for i, at in self.aliases:
                results[i] = args[at]
        return results

    def run(self, args: Sequence[Any]) -> Any:
        if any_autocast():  # casts are part of the graph
            with no_autocast():
                return self.program.run_forward(list(args))
        return self.program.run_forward(list(args))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: Compiled, args: tuple[Any, ...], *takes_gradient: Any) -> Any:
        results, call = compiled.run(args)
        ctx.set_materialize_grads(False)
        ctx.like = [(r.shape, r.dtype, r.device) for r, has in zip(results, compiled.has_gradient) if has]
        ctx.compiled, ctx.args = compiled, args
        ctx.versions = [t._version for t in takes_gradient]
        # saved in this way, tensors go with the backward pass, and writing to one of them is an error
        ctx.names = list(call.tensors)
        tensors = call.tensors.values()
        call.tensors = {}
        if others_save():  # what they save may be copies, and a copy of a handle names nothing
            ctx.call = call
            ctx.save_for_backward(*tensors)
        else:
            ctx.call = None
            ctx.save_for_backward(*tensors, handle((call,)))
        ctx.mark_non_differentiable(
            *[r for r, has in zip(results, compiled.has_gradient) if isinstance(r, torch.Tensor) and not has]
        )
        return tuple(None if at is not None else r for r, at in zip(results, compiled.arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        compiled = ctx.compiled
        grads = tuple(g for g, has in zip(grads, compiled.has_gradient) if has)
        if torch.is_grad_enabled():
            return None, None, *_again(ctx, grads)
        tensors = ctx.saved_tensors
        call = ctx.call or own_of(tensors[-1])
        values = {**call.values, **dict(zip(ctx.names, tensors))}
        given = [i for i, g in enumerate(grads) if g is not None]
        all_grads = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g.contiguous()
            for g, (shape, dtype, device) in zip(grads, ctx.like)
        ]
        found = compiled.program.run_backward(call, values, all_grads)
        if len(given) < len(grads):  # what has no part in the results that gradients came for has none
            reached = compiled.program.backward.reached
            found = [g if reached[i].intersection(given) else None for i, g in enumerate(found)]
        return None, None, *[found[i] for i in compiled.takes_gradient]


_node: Any = _Node
#: Function.apply without its look for functional transforms
_apply: Any = super(torch.autograd.Function, _node).apply


def _again(ctx: Any, grads: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Gradients that have gradients: those of what Dynamo traced, run once more for them."""
    compiled: Compiled = ctx.compiled
    if compiled.program.is_random:
        raise RuntimeError(
            "gradients of gradients need the forward pass once more, and this program draws random numbers: call the "
            "module without torch.compile"
        )
    places = compiled.takes_gradient
    given = [ctx.args[i] for i in places]
    if any(t._version != version for t, version in zip(given, ctx.versions)):
        raise RuntimeError(
            "a tensor that this gradient's gradient needs was written to after the forward pass: run the forward pass "
            "again"
        )
    # buffers follow the batch once, in the call itself
    own = [a.clone() if isinstance(a, torch.Tensor) and i not in places else a for i, a in enumerate(ctx.args)]
    results = [r for r, has in zip(compiled.graph_module.forward(*own), compiled.has_gradient) if has]
    both = [(r, g) for r, g in zip(results, grads) if g is not None]
    return torch.autograd.grad([r for r, _ in both], given, [g for _, g in both], create_graph=True, allow_unused=True)
