"""The backend "sparseconv" of torch.compile.

    model = torch.compile(model, backend="sparseconv")

Dynamo reads Python, AOTAutograd differentiates, and `sparseconv.compiler.program` runs what they make of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

from sparseconv.compiler import traced as traced
from sparseconv.compiler.fusion import fuse_inference, fuse_training
from sparseconv.compiler.program import Pass, Program
from sparseconv.compiler.rows import Rows
from sparseconv.compiler.settings import as_settled
from sparseconv.torch_private import LEAST_TO_TRACE, check_version

#: the programs that live, for `explain`
programs: weakref.WeakSet[Program] = weakref.WeakSet()


def sparseconv(
    graph_module: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile what Dynamo traced.

    Args:
        graph_module: the graph of torch's functions and this library's operators.
        inputs: what it is called with, as Dynamo knows it.
        options: ``poison=True`` fills rows that are no voxels with NaN after every operation, for tests.
        mode: None.

    Raises:
        RuntimeError: torch is older than 2.11.
        ValueError: another option, or a mode.
    """
    check_version("torch.compile(backend='sparseconv')", LEAST_TO_TRACE)
    as_settled()
    options = dict(options or {})
    poison = bool(options.pop("poison", False))
    if options or mode is not None:
        raise ValueError(
            f"the backend sparseconv takes options={{'poison': True}} and no mode; got {options}, {mode!r}"
        )
    if not any(
        getattr(n.target, "namespace", None) == "sparseconv" or "sparseconv." in str(n.target)
        for n in graph_module.graph.nodes
    ):
        return graph_module.forward
    held = [t for t in inputs if isinstance(t, torch.nn.Parameter)]
    program = Program(_name(graph_module), held, poison)
    programs.add(program)
    try:
        return _compiled(graph_module, inputs, program)
    except TorchDynamoException:
        raise
    except Exception as error:  # the graph that Dynamo made runs as it is
        program.broken = (
            f"it runs eagerly: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
        return graph_module.forward


def _name(graph_module: GraphModule) -> str:
    for node in graph_module.graph.nodes:
        if node.stack_trace:
            return node.stack_trace.strip().splitlines()[0].strip()
    return "a graph"


def _compiled(graph_module: GraphModule, inputs: Sequence[Any], program: Program) -> Callable[..., Any]:
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd

    results: list[int] = []
    rows: list[Rows] = []

    def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        run_boxed: Any = lambda args: run(args)  # noqa: E731
        run_boxed._boxed_call = True
        return run_boxed

    def partition(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        rows.append(Rows(joint))
        fuse_training(joint)
        results.append(num_fwd_outputs)
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)

    def forward(module: GraphModule, given: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        static = context.fw_metadata.static_input_indices if context and context.fw_metadata else ()
        program.forward = Pass(program, module, rows[-1], results[-1] if results else None, static)
        return boxed(program.run_forward)

    def backward(module: GraphModule, given: Any) -> Any:
        program.backward = Pass(program, module, rows[-1], None, (), program.forward)
        return boxed(program.run_backward)

    def inference(module: GraphModule, given: Any) -> Any:
        rows.append(Rows(module))
        fuse_inference(module)
        return forward(module, given)

    compiled = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(graph_module, inputs)
    return _differentiable_twice(compiled, graph_module, program) if results else compiled


def _differentiable_twice(
    compiled: Callable[..., Any], graph_module: GraphModule, program: Program
) -> Callable[..., Any]:
    """A program whose gradients have gradients: those of what Dynamo traced, run once more for them.

    AOTAutograd's own backward graph has none. It is asked first, in every backward pass without ``create_graph``.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        node: Any = next((r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None), None)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not program.is_random:
            node.sparseconv_call = args, [getattr(a, "_version", 0) for a in args]
            if function.__dict__["backward"] is not instead.get(function):
                instead[function] = _with_second(function.backward, graph_module)
                function.backward = instead[function]
                instead[function] = function.__dict__["backward"]
        return results

    instead: dict[Any, Any] = {}
    return run


def _with_second(first: Callable[..., Any], graph_module: GraphModule) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        call = getattr(ctx, "sparseconv_call", None)
        if not torch.is_grad_enabled() or call is None:
            return first(ctx, *grads)
        args, versions = call
        given = grads
        if len(grads) == 1 and isinstance(grads[0], list):  # torch 2.13 hands them over in a list, to let go of them
            grads = tuple(grads[0])
        if len(args) != len(ctx.needs_input_grad):
            return first(ctx, *given)
        wanted = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]
        if any(args[i]._version != versions[i] for i in wanted):
            raise RuntimeError(
                "a tensor that this gradient's gradient needs was written to after the forward pass: run the forward "
                "pass again"
            )
        # buffers follow the batch once, in the call itself
        own = [a.clone() if isinstance(a, torch.Tensor) and i not in wanted else a for i, a in enumerate(args)]
        results = graph_module.forward(*own)
        if len(results) != len(grads):
            return first(ctx, *given)
        pairs = [
            (r, g) for r, g in zip(results, grads) if isinstance(r, torch.Tensor) and r.requires_grad and g is not None
        ]
        found = torch.autograd.grad(
            [r for r, _ in pairs],
            [args[i] for i in wanted],
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
        )
        by_place = dict(zip(wanted, found))
        return tuple(by_place.get(i) for i in range(len(args)))

    return staticmethod(backward)
