"""`sc.accelerate`: the sparse parts of a model, compiled by ``torch.compile(part, backend="sparseconv")``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeVar, overload

import torch

from sparseconv.checks import warn
from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn.captured_inference import CapturedInference
from sparseconv.nn.geometry import LayerGeometry
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import (
    LEAST_TO_TRACE,
    check_version,
    errors_are_eager,
    forget_values,
    global_of_guard,
)

Module = TypeVar("Module", bound=torch.nn.Module)


def accelerate(model: Module) -> Module:
    """Compile each sparse part of a model with ``torch.compile(part, backend="sparseconv")``. Returns the same model.

    A sparse part is the smallest module that holds all sparse layers: those of `sparseconv.nn`, or of the libraries
    whose names `sparseconv.interop` offers. On a GPU its calls replay CUDA graphs, kernel maps included, for scenes of
    any size. The model stays what it was: its parameters, ``state_dict`` keys, optimizer and hooks know nothing of it,
    and a copy is a plain model. `nn.explain` says what was compiled and what runs eagerly, and `nn.release` undoes it.

    The first call of each kind (training, inference, another dtype) is traced, which takes seconds, and runs eagerly.
    Without a CUDA device the model stays as it is, and a warning says so.

    Beyond what `torch.compile` guards, calls rely on this library's own functions and on the kernel sizes, strides and
    other geometry of its layers to stay what they were when the call was traced.

    Args:
        model: any module that holds sparse layers.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no sparse layer.
        RuntimeError: there is a CUDA device, and torch is older than 2.11.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> model = sc.accelerate(nn.UNet(4, 3, channels=(8, 16)))
    >>> nn.explain(model)
    'nothing is compiled: see sc.accelerate'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate takes a torch.nn.Module; got {type(model).__name__}")
    parts = list(sparse_parts(model))
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no sparse layer, neither of sparseconv.nn nor of sparseconv.interop's names; "
            "one whose modules call functions, such as flex_gemm's, is compiled by name: nn.capture(model.backbone)"
        )
    if not torch.cuda.is_available():
        warn("sc.accelerate changes nothing here: it replays CUDA graphs, and torch.cuda.is_available() is False")
        return model
    for part in parts:
        compile_part(part)
    return model


def compile_part(module: torch.nn.Module) -> None:
    """Compile one module, as `accelerate` compiles the sparse parts of a model."""
    if torch.cuda.is_available():  # without it calls stay plain
        check_version("sc.accelerate (and nn.capture without an example)", LEAST_TO_TRACE)
    if module._compiled_call_impl is not None:
        return
    plain = module._call_impl
    like = next(module.parameters(), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo keeps programs by code: these are of this module alone
    compiled = torch.compile(call, backend="sparseconv", options={"guard_filter_fn": watched})

    def either(*args: Any, **kwargs: Any) -> Any:
        """On a CPU, and within another trace, calls are the plain calls."""
        if torch.compiler.is_compiling() or (like is not None and not like.is_cuda):
            return plain(*args, **kwargs)
        for given in (*args, *kwargs.values()):
            if (prepare := getattr(given, "prepare_for_trace", None)) is not None:
                prepare()
        with errors_are_eager():
            return compiled(*args, **kwargs)

    module._compiled_call_impl = either


@overload
def capture(module: Module) -> Module: ...
@overload
def capture(
    module: torch.nn.Module,
    example: SparseTensor,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedInference: ...
def capture(
    module: torch.nn.Module,
    example: SparseTensor | None = None,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> Any:
    """Replay a module's calls as CUDA graphs.

    **Without an example** the module itself is compiled as `accelerate` compiles the sparse parts of a model, and
    returned.

    **With an example** the inference of a network in ``eval()`` is captured at once, maps included, and the result is
    an object to call: a call costs the CPU next to nothing, and never waits for the GPU. A scene that turns out not to
    fit gives NaN (-1 in integers), and a later call raises the reason.

    Args:
        module: any module. With an example its output is a `SparseTensor` on the input's grid, a tensor whose rows are
            the voxels', a tensor of a size that no scene changes, or a tuple, list or dict of these.
        example: a scene as they will come, on the network's device; it gives dtype, batch size and typical sizes.
        room: with an example: rows of every grid over those that it has for the example, at least 1.
        max_voxels: with an example: voxels of the largest scene; default: those of the example times ``room``.
            Rounded up to 256.
        extent: with an example: the box that voxels lie in; default: the example's, grown by an eighth on each side.

    Raises:
        TypeError, ValueError: arguments that do not fit; with an example also a network in training, or a result whose
            number of rows the CPU cannot know.
        RuntimeError: the example does not fit into ``extent``, or its network does what no graph can hold.

    >>> import torch, sparseconv as sc
    >>> from sparseconv import nn
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> fast = nn.capture(nn.UNet(4, 3, channels=(8, 16)).eval(), sc.SparseTensor(grid, torch.randn(len(grid), 4)))
    >>> logits = fast((grid.coords, torch.randn(len(grid), 4)))  # no grid, which would wait for the GPU
    >>> logits.shape == (len(grid), 3)
    True
    """
    if example is None and room == 1.25 and max_voxels is None and extent is None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"capture takes a torch.nn.Module; got {type(module).__name__}")
        compile_part(module)
        return module
    return CapturedInference(module, example, None, 0, room, max_voxels, extent)


def release(module: Module) -> Module:
    """Undo `accelerate` and `capture` for a module and its parts: calls are the plain calls again, and the memory of
    their CUDA graphs is free.

    >>> from sparseconv import nn
    >>> release(nn.capture(nn.SubmanifoldConv(4, 8, 3)))
    SubmanifoldConv(4, 8, kernel_size=3)
    """
    for part in module.modules():
        part._compiled_call_impl = None
    return module


def explain(module: torch.nn.Module) -> str:
    """What of a module and its parts is compiled: programs, their calls and replays, the capacity of their arrays, the
    GPU memory of their graphs, what runs eagerly and why, graph breaks and recompilations, each with its line of source
    or its guard.

    >>> explain(torch.nn.ReLU())
    'nothing is compiled: see sc.accelerate'
    """
    from sparseconv.compiler.explain import programs_of  # loaded where it is used

    programs = programs_of(module)
    if programs is None and any(part._compiled_call_impl is not None for part in module.modules()):
        return "no call has been compiled yet"
    return programs or "nothing is compiled: see sc.accelerate"


def sparse_parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The smallest modules below that hold all sparse layers and can be called: one, but for lists of modules."""
    if _is_layer(module):
        yield module
        return
    having = [child for child in module.children() if _has_layers(child)]
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    if isinstance(module, lists) or (len(having) == 1 and not isinstance(having[0], lists)):
        for child in having:
            yield from sparse_parts(child)
    elif having:
        yield module


def _has_layers(module: torch.nn.Module) -> bool:
    return any(map(_is_layer, module.modules()))


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether a module's class, or one that it derives from, is of this library or of its other names."""
    return any(kind.__module__.startswith("sparseconv.") for kind in type(module).__mro__)


# ---- guards


def watched(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards are asked before each call, as its ``guard_filter_fn``.

    Left out are those on functions and classes of this library, of torch and of Python, and on the geometry of layers,
    which cannot be assigned. For a U-Net they take longer than all others, those on its modules and on the arguments.
    """
    forget_values(guards)
    geometries = tuple(g.name for g in guards if g.has_value and isinstance(g.value, LayerGeometry))
    return [not (guard.name.startswith(geometries) or _is_of_a_library(guard)) for guard in guards]


def _is_of_a_library(guard: Any) -> bool:
    if (place := global_of_guard(guard.name)) is not None:
        module, *names = place
        found = sys.modules.get(module)
        if found is None or not _is_library(module):
            return False
        for name in names:  # what a function or class has is its own
            if isinstance(found := getattr(found, name, None), (FunctionType, BuiltinFunctionType, type)):
                return True
        return isinstance(found, ModuleType)
    if guard.name.startswith(("type(", "dict(type(")) and guard.has_value:  # of an object, such as its forward
        if isinstance(found := guard.value, (dict, MappingProxyType)):
            return _is_library(found.get("__module__", ""))
        return isinstance(found, (FunctionType, type)) and _is_library(found.__module__)
    return False


def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("sparseconv", "torch", "builtins")
