"""Dynamo's settings while it traces for this backend, and only then."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from sparseconv.torch_private import LEAST_TO_TRACE, any_module_hook, check_version, leave_to_python

#: what Dynamo must do for programs of this library
WANTED: dict[str, Any] = {
    "capture_scalar_outputs": True,  # a spatial shape that the client reads from its coordinates
    "capture_dynamic_output_shape_ops": True,  # numbers of voxels
    "assume_static_by_default": False,  # the first scene's number of voxels is a symbol
    "specialize_float": True,
    "skip_nnmodule_hook_guards": False,  # hooks that are added later
    "allow_unspec_int_on_nn_module": True,  # counters
    "recompile_limit": 16,
}


def while_tracing() -> None:
    """Called by what a trace follows, where it meets the first grid: have Dynamo start anew with these settings, and
    leave the frame to Python where somebody hooks every module, which Dynamo does not do.

    Other backends trace as they please.
    """
    from torch._dynamo import symbolic_convert

    compiler: Any = symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    while (inner := getattr(compiler, "_torchdynamo_orig_backend", getattr(compiler, "compiler_fn", None))) is not None:
        compiler = inner
    if getattr(compiler, "__module__", None) != f"{__package__}.backend":
        return
    check_version("torch.compile(backend='sparseconv')", LEAST_TO_TRACE)
    if any_module_hook():
        leave_to_python("a hook is called around every module")
    as_settled()


#: Dynamo runs such a function and takes its result for a constant; see torch.compiler.assume_constant_result
while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

_open: list[contextlib.ExitStack] = []


def as_settled() -> None:
    """Return where Dynamo traced with these settings; else set them, and have it trace this frame anew."""
    from torch._dynamo import callback, config, exc, symbolic_convert
    from torch.fx.experimental import _config as sizes

    if all(getattr(config, name) == value for name, value in WANTED.items()):
        return
    stack = contextlib.ExitStack()
    stack.enter_context(config.patch(**WANTED))
    # sizes that agree in the first scene are not one size
    stack.enter_context(sizes.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    stack.enter_context(_norms_of_unknown_rows())
    stack.enter_context(_without("_plans"))
    stack.enter_context(_arrays_of_names_stay())
    stack.enter_context(_arrays_are_compared_alike())
    stack.enter_context(_integers_of_modules_stay())
    stack.enter_context(_symbols_are_found())
    _open.append(stack)
    if _unset not in callback.callback_handler.end_callbacks:
        callback.on_compile_end(_unset)
    symbolic_convert.InstructionTranslator.current_tx().speculation_log.clear()  # other settings break elsewhere
    raise exc.TensorifyScalarRestartAnalysis(restart_reason="sparseconv: settings of this backend")


def _unset(_: Any) -> None:
    while _open:
        _open.pop().close()


@contextlib.contextmanager
def _norms_of_unknown_rows() -> Any:
    """torch's batch norm asks whether there is one row, before it asks anything else: nobody knows while it traces.

    Where the program runs, `batch_norm` asks the same of the scene.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    functional: Any = torch.nn.functional
    asked = functional._verify_batch_size

    def verify(size: Any) -> None:
        rows = size[0]
        for n in size[2:]:
            rows = rows * n
        if guard_or_false(rows == 1):
            asked(size)

    functional._verify_batch_size = verify
    try:
        yield
    finally:
        functional._verify_batch_size = asked


@contextlib.contextmanager
def _without(name: str) -> Any:
    """Objects of this room that a program returns leave without that attribute, which only the trace reads: what is
    kept in it would be made and returned at every call."""
    from torch._dynamo.side_effects import SideEffects

    kind: Any = SideEffects
    prune = kind.prune_dead_object_new

    def prune_first(self: Any, tx: Any) -> Any:
        if not getattr(tx.output.compile_subgraph_reason, "graph_break", True):
            for of, attributes in self.store_attr_mutations.items():
                if getattr(getattr(of, "value_type", None), "__module__", "") == f"{__package__}.traced":
                    attributes.pop(name, None)
        return prune(self, tx)

    kind.prune_dead_object_new = prune_first
    try:
        yield
    finally:
        kind.prune_dead_object_new = prune


@contextlib.contextmanager
def _arrays_of_names_stay() -> Any:
    """An array of NumPy that is no tensor, such as the names of a batch's frames, passes through a program as an object
    of Python. Dynamo would leave the frame, since it takes every array for a tensor."""
    from torch._dynamo.variables.builder import VariableBuilder

    wrappers: Any = VariableBuilder._type_dispatch()
    wrap = wrappers[np.ndarray]

    def wrap_numbers(builder: Any, array: Any) -> Any:
        return wrap(builder, array) if array.dtype.kind in "biufc" else builder.wrap_user_defined(array)

    wrappers[np.ndarray] = wrap_numbers
    try:
        yield
    finally:
        wrappers[np.ndarray] = wrap


@contextlib.contextmanager
def _arrays_are_compared_alike() -> Any:
    """Guards compare an array of NumPy as a tensor. Dynamo makes one outside of inference mode while it compiles, and
    another within it at each call: they would never be alike."""
    from torch._dynamo import guards

    as_tensor = guards.from_numpy
    guards.from_numpy = torch.inference_mode(False)(as_tensor)
    try:
        yield
    finally:
        guards.from_numpy = as_tensor


@contextlib.contextmanager
def _integers_of_modules_stay() -> Any:
    """Integers below a module, such as kernel sizes, are constants that calls guard. As symbols they take a third of
    the time to trace a network. Those of a client's module that have changed, such as a count of calls, are symbols."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import builder

    #: by the source of a module: whether its class is of torch or of this library
    modules: dict[str, bool] = {}
    kind: Any = builder.VariableBuilder
    wrap, is_constant = kind.wrap_module, builder.is_int_specialization_case

    def wrap_module(self: Any, module: Any) -> Any:
        modules[self.source.name] = type(module).__module__.split(".")[0] in ("torch", "sparseconv")
        return wrap(self, module)

    def is_constant_here(value: Any, source: Any) -> bool:
        owner = source.name
        while owner and owner not in modules:
            owner = owner[: max(owner.rfind("."), owner.rfind("["), 0)]
        if modules.get(owner, False) or is_constant(value, source):
            return True
        if not owner:
            return False
        seen = builder.FrameStateSizeEntry.make_scalar(value)
        given: Any = InstructionTranslator.current_tx(), source.name, seen
        return builder.process_automatic_dynamic(*given, is_unspecialized_nn_module=True).scalar == value

    kind.wrap_module = wrap_module
    builder.is_int_specialization_case = is_constant_here
    try:
        yield
    finally:
        kind.wrap_module = wrap
        builder.is_int_specialization_case = is_constant


@contextlib.contextmanager
def _symbols_are_found() -> Any:
    """Whether a list holds a constant is asked of its symbols, too. Dynamo takes ``3 in [n]`` for False."""
    from torch._dynamo import utils
    from torch._dynamo.variables import lists

    contains = utils.iter_contains

    def known(item: Any) -> Any:
        item = item.realize()
        if isinstance(item, lists.BaseListVariable):
            return item.clone(items=[known(i) for i in item.items])
        return utils.specialize_symnode(item)

    def contains_known(items: Any, search: Any, *more: Any, **options: Any) -> Any:
        return contains(map(known, items) if search.is_python_constant() else items, search, *more, **options)

    rooms: Any = (utils, lists)
    for room in rooms:
        room.iter_contains = contains_known
    try:
        yield
    finally:
        for room in rooms:
            room.iter_contains = contains


def _batch_norm(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    if has_free_unbacked_symbols(input):  # else it asks whether there is a row
        return torch.ops.aten.native_batch_norm.default(input, weight, bias, mean, var, training, momentum, eps)[0]
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    given = input, weight, bias, mean, var, training, momentum, eps, cudnn
    return torch.ops.aten.batch_norm.default._op_dk(key, *given)


torch.ops.aten.batch_norm.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_batch_norm)
