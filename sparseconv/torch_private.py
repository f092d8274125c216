"""Every private name of torch that this package uses, each with a public stand-in.

A private name may go with any release of torch. What stands in gives the same numbers; where torch has no public way to
ask, the answer is the careful one (someone may be listening), which costs microseconds a call.

Where Python's own attribute is meant (``tensor._version``, ``module._parameters``) it is read in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

try:
    from torch.utils import _pytree as _trees
except ImportError:
    _trees = None  # type: ignore[assignment]
try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode(nullcontext):  # type: ignore[no-redef, type-arg]
        """Sees nothing: whoever wants to spare operations runs them all."""


def private(path: str, instead: Any) -> Any:
    """What ``torch.<path>`` is, or what stands in for it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return instead


#: of this torch, (2, 11)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
#: the oldest torch whose Dynamo and torch.export read this package's networks
LEAST_TO_TRACE = (2, 11)


def check_version(what: str, least: tuple[int, int]) -> None:
    """Raise RuntimeError for what this torch is too old for; all else runs on it."""
    if least > VERSION:
        raise RuntimeError(
            f"{what} needs torch {least[0]}.{least[1]} or newer; this is {torch.__version__}: update torch, or "
            "run the network eagerly, which this version does"
        )


# ---- who listens

#: how many dispatch modes there are
dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)
#: whether autocast is on for any device
any_autocast: Callable[[], bool] = private("_C._is_any_autocast_enabled", lambda: True)
no_autocast: Callable[[], AbstractContextManager[Any]] = private("_C._DisableAutocast", nullcontext)
#: whether there are transforms of torch.func
functional: Callable[[], bool] = private("_C._are_functorch_transforms_active", lambda: True)
#: the transforms of torch.func there are, from the outermost, and the kind that jvp is
interpreters: Callable[[], Any] = private("_C._functorch.get_interpreter_stack", lambda: ())
JVP: Any = private("_C._functorch.TransformType.Jvp", None)
#: whether a transform of torch.func wraps a tensor, whether it is vmap, and what it holds
is_wrapped: Callable[[torch.Tensor], bool] = private("_C._functorch.is_functorch_wrapped_tensor", lambda t: False)
is_batched: Callable[[torch.Tensor], bool] = private("_C._functorch.is_batchedtensor", lambda t: False)
unwrapped: Callable[[torch.Tensor], torch.Tensor] = private("_C._functorch.get_unwrapped", lambda t: t)
#: whether a tensor is a batch of cotangents, of torch.autograd.grad(is_grads_batched=True); it has no memory to read
is_batch_of_cotangents: Callable[[torch.Tensor], bool] = private(
    "_C._functorch.is_legacy_batchedtensor", lambda t: False
)
#: outside of the transforms of torch.func
no_transforms: Callable[[], AbstractContextManager[Any]] = private("_C._DisableFuncTorch", nullcontext)
#: below autograd's own key of the dispatcher; None where a kernel has to be called itself
below_autograd: Callable[[], AbstractContextManager[Any]] | None = private("_C._AutoDispatchBelowAutograd", None)
#: whether a hook is called around every module; torch before 2.7 does not say so in one call
_GLOBAL_HOOKS = [f"_global_{kind}_hooks" for kind in ("backward_pre", "backward", "forward_pre", "forward")]
any_module_hook: Callable[[], bool] = private(
    "nn.modules.module._has_any_global_hook",
    lambda: any(private(f"nn.modules.module.{name}", True) for name in _GLOBAL_HOOKS),
)
#: what torch.utils.data.default_collate makes of items of a class; its documentation has this name, and no public place
collators: dict[Any, Callable[..., Any]] = private("utils.data._utils.collate.default_collate_fn_map", {})
#: the base of torch's batch norms
BatchNormBase: Any = private(
    "nn.modules.batchnorm._BatchNorm",
    (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
)


if TYPE_CHECKING:
    settable = property
else:

    class settable(property):
        """A property whose assignment torch.compile follows: Dynamo of torch 2.11 knows no assignment but Python's."""

        def __init__(self, *functions, **more):
            super().__init__(*functions, **more)
            self.assign = self.fset

        def __set__(self, instance, value):
            self.assign(instance, value)


def exporting() -> bool:
    """Whether torch.export traces. Within torch.compile, Dynamo of torch 2.11 answers the public name with True."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    if flag is None:
        return getattr(torch.compiler, "is_exporting", lambda: False)()
    return bool(flag)


#: the class of torch's operators, as nodes of a traced graph name them
operator_kind: Any = type(torch.ops.aten.add.Tensor)


def leave_to_python(why: str) -> None:
    """Called by what torch.compile cannot trace: the frame that it traces, and all that this calls, run eagerly."""
    from torch._dynamo import exc, types

    skipped = exc.SkipFrame(why)
    skipped.frame_exec_strategy = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
    raise skipped


#: Dynamo runs such a function while it traces; see torch.compiler.assume_constant_result
leave_to_python._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def errors_are_eager() -> Iterator[None]:
    """Within it, a frame that torch.compile fails to trace runs eagerly, and a warning in the log says why."""
    config: Any = sys.modules["torch._dynamo"].config
    before = config.suppress_errors
    config.suppress_errors = True
    try:
        yield
    finally:
        config.suppress_errors = before


def check_in_trace(*holds: Any) -> None:
    """Tell a trace what holds of numbers that it does not know."""
    torch._check(*holds)


def surely(holds: Any) -> bool:
    """Whether a comparison holds; not where it is about a number that only the run of a traced program knows."""
    if not torch.compiler.is_compiling() and not exporting():
        return bool(holds)
    try:
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # loaded where somebody traces
    except ImportError:
        return bool(holds)
    return guard_or_false(holds)


def records_proxies() -> bool:
    """Whether make_fx records the operations of this call; not where torch.compile lets it, over maps that it guards.

    Nobody does as long as its module, which takes long to import, is not there.
    """
    found: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return found is not None and found.get_proxy_mode() is not None and _compiling_context() is None


#: the level of dual tensors, below 0 for none; where torch hides it, one that may be there
dual_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)


#: what torch.compile keeps about the graph that it traces, None outside of it
_compiling_context: Callable[[], Any] = private("_guards.TracingContext.try_get", lambda: None)

# ---- autograd's graph

#: the number of the backward pass that this thread is in, -1 outside of any
backward_pass: Callable[[], int] = private("_C._current_graph_task_id", lambda: 0)
#: whether the backward pass under way may be followed by another one over the same graph
keeps_graph: Callable[[], bool] = private("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
_hooks_allowed: Callable[[], bool] = private("_C._autograd._saved_tensors_hooks_is_enabled", lambda: False)
_top_hooks: Callable[[bool], Any] = private("_C._autograd._top_saved_tensors_default_hooks", lambda ignore: ())


def others_save() -> bool:
    """Whether somebody else decides what graphs keep, such as activation checkpointing, or nobody may."""
    return not _hooks_allowed() or _top_hooks(False) is not None


def node_class(function: type[torch.autograd.Function]) -> type | None:
    """The class of the nodes of an autograd function, or None."""
    return getattr(function, "_backward_cls", None)


def graph_metadata() -> Any:
    """What AOTAutograd found out about the graph that it has a backend compile."""
    return _compiling_context().fw_metadata


def trace_reasons(graph_module: torch.fx.GraphModule) -> tuple[str | None, str | None]:
    """Of the graph that Dynamo is about to have compiled: why it ends before its function does, and why it is traced
    again; None where it does not, or is not, or torch does not say."""
    end: Any = getattr(graph_module, "compile_subgraph_reason", None)
    broken = None
    if end is not None and end.graph_break:
        words = re.search(r"Explanation: (.*)", end.reason) or re.search(r"(.*)", end.reason)
        place = f" [{end.user_stack[-1].filename}:{end.user_stack[-1].lineno}]" if end.user_stack else ""
        broken = f"{words.group(1)}{place}" if words else place
    context = getattr(sys.modules.get("torch._dynamo.utils"), "get_metrics_context", lambda: None)
    guard = getattr(context(), "_metrics", {}).get("recompile_reason")
    return broken, re.sub(r"^\d+/\d+: |\s*#.*", "", guard.splitlines()[0]) if guard else None


def graph_results(metadata: Any) -> str | tuple[list[int | None], list[bool]]:
    """What AOTAutograd found out about the results of a graph: of each, the argument that it is, if it is one, and
    whether it is differentiated; or why they are not the graph's own results alone."""
    written = metadata.mutated_inp_runtime_indices
    if written:
        return f"argument {written[0]} is written to, and has gradients or gets another shape"
    if any(hasattr(meta, "attrs") for meta in metadata.subclass_inp_meta + metadata.subclass_fw_graph_out_meta):
        return "an argument or a result is of a subclass of torch.Tensor"
    arguments: list[int | None] = []
    differentiated: list[bool] = []
    for i, info in enumerate(metadata.output_info):
        kind = info.output_type.name
        if kind not in ("non_alias", "unsafe_view_alias", "custom_function_view", "is_input"):
            return f"result {i} is a view of {'an argument' if kind == 'alias_of_input' else 'another tensor'}"
        is_argument = kind == "is_input"
        arguments.append(info.base_idx if is_argument else None)
        has = info.requires_grad and issubclass(info.raw_type, torch.Tensor) and not is_argument
        differentiated.append(has)
    return arguments, differentiated


_IMPORTED = re.compile(r"G\['__import_(\w+)'\]((?:\.\w+)*)")
_BUILTIN = re.compile(r"G\['__builtins_dict__\w*'\]\['(\w+)'\]")


def forget_values(guards: Sequence[Any]) -> None:
    """Have Dynamo, which builds guards once more when it has asked which to keep, take other objects for their values:
    of an array of NumPy it makes a new tensor each time, and would compare the two."""
    for guard in guards:
        guard.orig_guard.obj_weakref = None


def global_of_guard(name: str) -> list[str] | None:
    """The module, and the names within it, of what one of Dynamo's guards is about; None if that is no global."""
    if found := _IMPORTED.match(name):
        return [found.group(1).replace("_dot_", "."), *found.group(2).split(".")[1:]]
    found = _BUILTIN.match(name)
    return None if found is None else ["builtins", found.group(1)]


# ---- ahead of time


def compile_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> bool:
    """Write a file that C++ runs, of machine code for this CPU; False where torch has no AOTInductor."""
    try:
        from torch._inductor import aoti_compile_and_package as compiled
    except ImportError:
        return False
    compiled(program, package_path=path, inductor_configs={"aot_inductor.metadata": metadata})
    return True


def load_package(path: str) -> Callable[..., Any]:
    """Such a file as a function."""
    from torch._inductor import aoti_load_package as load

    loaded: Callable[..., Any] = load(path)
    return loaded


# ---- the card

#: torch.cuda.current_device without its look at whether CUDA is set up, which a tensor on a card says
current_device: Callable[[], int] = private("_C._cuda_getDevice", torch.cuda.current_device)
#: the same of torch.cuda.is_current_stream_capturing
is_capturing: Callable[[], bool] = private("_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
#: the address of the current stream of a device; 0 where torch was built without CUDA
current_stream: Callable[[int], int] = private(
    "_C._cuda_getCurrentRawStream",
    (lambda index: torch.cuda.current_stream(index).cuda_stream) if torch.version.cuda else (lambda index: 0),
)
#: let go of cuBLAS's workspaces; torch frees them at its end where it does not offer that
clear_workspaces: Callable[[], None] = private("_C._cuda_clearCublasWorkspaces", lambda: None)
#: whether fp32 products may be in TF32
allows_tf32: Callable[[], bool] = private(
    "_C._get_cublas_allow_tf32", lambda: bool(torch.backends.cuda.matmul.allow_tf32)
)
#: multiply each of many tensors by one number on their device, by one kernel on a card where torch can
multiply_each: Callable[[list[torch.Tensor], torch.Tensor], None] = private(
    "_foreach_mul_", lambda tensors, by: [t.mul_(by) for t in tensors]
)
#: have the allocator of a device give no more memory of a graph's pool, which torch leaves out where CUDA broke off
end_pool: Callable[[int, tuple[int, int]], None] = private("_C._cuda_endAllocateToPool", lambda device, pool: None)


# ---- tuples, lists and dicts of tensors

_views: Any = private("_utils._unflatten_dense_tensors", None)


def pieces(flat: torch.Tensor, like: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """One after another, pieces of (M,) with the shapes of other tensors: views of it."""
    if _views is not None and all(t.numel() for t in like):  # torch gives all empty tensors the shape (0,)
        views: Sequence[torch.Tensor] = _views(flat, like)
        return views
    return [piece.view(t.shape) for piece, t in zip(flat.split([t.numel() for t in like]), like)]


def _flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Leaves, and the form that `_unflatten` takes."""
    kind = type(tree)
    if kind not in (tuple, list, dict) or (is_leaf is not None and is_leaf(tree)):
        return [tree], None
    keys = list(tree) if kind is dict else None
    parts = [_flatten(part, is_leaf) for part in (tree.values() if kind is dict else tree)]
    return [leaf for leaves, _ in parts for leaf in leaves], (kind, keys, [(len(a), form) for a, form in parts])


def _unflatten(leaves: Any, form: Any) -> Any:
    left = list(leaves)
    if form is None:
        return left[0]
    kind, keys, parts = form
    made = []
    for count, part in parts:
        made.append(_unflatten(left[:count], part))
        left = left[count:]
    return dict(zip(keys, made)) if kind is dict else kind(made)


def _map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    leaves, form = _flatten(tree, is_leaf)
    return _unflatten(map(function, leaves), form)


#: torch's trees: ``tree_flatten``, ``tree_unflatten``, ``tree_leaves`` and ``tree_map``; of plain containers alone
#: where torch has none
pytree: Any = _trees or SimpleNamespace(
    tree_flatten=_flatten, tree_unflatten=_unflatten, tree_leaves=lambda tree: _flatten(tree)[0], tree_map=_map
)


def register_tree(kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[..., Any]) -> None:
    """Let torch's trees look into objects of a class, where they alone are asked for tensors: before torch 2.13.

    Fully sharded networks wait for the gradients of their results there. Of results that are not seen, they reduce no
    gradient, without a word.
    """
    if _trees is not None and VERSION < (2, 13):
        _trees.register_pytree_node(kind, flatten, unflatten)
