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
from sparseconv.compiler.node import Compiled, NotPlain
from sparseconv.compiler.program import Pass, Program
from sparseconv.compiler.rows import Rows
from sparseconv.compiler.settings import as_settled
from sparseconv.torch_private import LEAST_TO_TRACE, check_version, graph_metadata, trace_reasons

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
        return _as_it_is(graph_module, inputs)
    held = [t for t in inputs if isinstance(t, torch.nn.Parameter)]
    program = Program(_name(graph_module), held, poison)
    program.graph_break, program.recompiled = trace_reasons(graph_module)
    programs.add(program)
    try:
        return _compiled(graph_module, inputs, program)
    except TorchDynamoException:
        raise
    except Exception as error:  # the graph that Dynamo made runs as it is
        words = (str(error).strip().splitlines() or [""])[0]
        program.broken = (
            f"it runs eagerly: {words if isinstance(error, NotPlain) else f'{type(error).__name__}: {words}'}"
        )

        eager = _as_it_is(graph_module, inputs)

        def run(*args: Any) -> Any:
            program.calls += 1
            return eager(*args)

        return run


def _as_it_is(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph that Dynamo made, run eagerly; by AOTAutograd where it holds checkpoints, since those of Dynamo do
    not draw the same random numbers again."""
    if not any(n.target is torch.ops.higher_order.tag_activation_checkpoint for n in graph_module.graph.nodes):
        return graph_module.forward
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def boxed(module: GraphModule, given: Any) -> Any:
        return make_boxed_func(module.forward)

    run = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=default_partition)
    return run(graph_module, inputs)  # type: ignore[no-any-return]


def _name(graph_module: GraphModule) -> str:
    for node in graph_module.graph.nodes:
        if node.stack_trace:
            return node.stack_trace.strip().splitlines()[0].strip()
    return "a graph"


def _compiled(graph_module: GraphModule, inputs: Sequence[Any], program: Program) -> Callable[..., Any]:
    """The program of AOTAutograd's graphs: it traces and differentiates, and `Compiled` calls."""
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: dict[str, Any] = {}

    def partition(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        found["rows"] = Rows(joint)
        fuse_training(joint)
        parts = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)
        found["backward"] = parts[1]
        return parts

    def graph(module: GraphModule, given: Any) -> Any:
        found["metadata"], found["forward"] = graph_metadata(), module
        return make_boxed_func(module.forward)

    def inference(module: GraphModule, given: Any) -> Any:
        found["rows"] = Rows(module)
        fuse_inference(module)
        return graph(module, given)

    aot_autograd(
        fw_compiler=graph,
        bw_compiler=lambda module, given: make_boxed_func(module.forward),
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(graph_module, inputs)
    metadata, rows = found["metadata"], found["rows"]
    results = len(metadata.output_info)
    program.forward = Pass(program, found["forward"], rows, results, metadata.static_input_indices)
    if "backward" in found:
        saved = {n.name for n in program.forward.saved}
        for node in found["backward"].graph.find_nodes(op="placeholder"):
            if node.name not in saved and "tangents" not in node.name:  # such as a generator's state, for checkpoints
                raise NotPlain(f"its gradients need {node.name}, which is no result of its operations")
        program.backward = Pass(program, found["backward"], rows, forward=program.forward)
    return Compiled(program, graph_module, metadata)
