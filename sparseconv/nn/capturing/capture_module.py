"""Capture a module, or each sparse part of a model; undo it, and say what was captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from sparseconv.checks import warn
from sparseconv.nn.capturing.module import Captured
from sparseconv.nn.capturing.region import is_sparse_layer

Module = TypeVar("Module", bound=torch.nn.Module)


def capture_module(module: Module) -> Module:
    """`nn.capture` without an example: replay this module's calls as CUDA graphs. Returns the same module."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"capture takes a torch.nn.Module; got {type(module).__name__}")
    if not isinstance(module.__dict__.get("forward"), Captured):
        module.__dict__["forward"] = Captured(module)
    return module


def accelerate(model: Module) -> Module:
    """Capture each sparse part of a detector or segmenter, as `nn.capture` captures a module. Returns the same model.

    A sparse part is the smallest module that holds all sparse layers, this library's or those of other libraries'
    names. Where it does what no graph can hold, its own sparse parts are captured instead; a layer alone, whose
    map a graph would find anew, stays as it is. `nn.explain` says what is captured; `nn.release` undoes it.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> model = sc.accelerate(nn.UNet(4, 3, channels=(8, 16)))
    >>> nn.explain(model)
    'UNet:\\n  on cpu: calls run as they are, graphs need an NVIDIA GPU'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate takes a torch.nn.Module; got {type(model).__name__}")
    parts = list(sparse_parts(model))
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no sparse layer: neither of sparseconv.nn nor of sparseconv.interop's names"
        )
    if not torch.cuda.is_available():
        warn("sc.accelerate changes nothing here: it replays CUDA graphs, and torch.cuda.is_available() is False")
    for part in parts:
        _capture(part, model)
    return model


def release(module: Module) -> Module:
    """Undo `capture` for a module and its parts: calls are the plain calls again, and the graphs' memory is free.

    >>> from sparseconv import nn
    >>> release(nn.capture(nn.SubmanifoldConv(4, 8, 3)))
    SubmanifoldConv(4, 8, kernel_size=3)
    """
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), Captured):
            del part.__dict__["forward"]
    return module


def explain(module: torch.nn.Module) -> str:
    """What of a module and its parts is captured, how often that was replayed, the memory that its graphs hold, and why
    other calls were eager.

    >>> explain(torch.nn.ReLU())
    'nothing is captured: see nn.capture'
    """
    from sparseconv.compiler import explain as compiled  # loaded where it is used

    if (programs := compiled.programs_of(module)) is not None:
        return programs

    found = [part.__dict__["forward"] for part in module.modules() if "forward" in part.__dict__]
    said = [forward.explain() for forward in found if isinstance(forward, Captured)]
    return "\n".join(said) or "nothing is captured: see nn.capture"


def sparse_parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The smallest modules below that hold all sparse layers and can be called: one, but for lists of modules."""
    if is_sparse_layer(module):
        yield module
        return
    held = [child for child in module.children() if _holds_layers(child)]
    listed = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    if listed or (len(held) == 1 and not isinstance(held[0], (torch.nn.ModuleList, torch.nn.ModuleDict))):
        for child in held:
            yield from sparse_parts(child)
    elif held:
        yield module


def _holds_layers(module: torch.nn.Module) -> bool:
    return any(is_sparse_layer(m) for m in module.modules())


def _capture(module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Capture a part of a model; its parts, where that is refused or a layer elsewhere undoes one within."""
    if _is_undone_elsewhere(module, model):
        _capture_parts(module, model)
        return
    captured: Any = capture_module(module).__dict__["forward"]
    captured.instead = _instead


def _instead(refused: Captured) -> None:
    """Capture the parts of a module. No layer outside of it undoes one within, or it were not captured."""
    _capture_parts(refused.module, refused.module)


def _capture_parts(module: torch.nn.Module, model: torch.nn.Module) -> None:
    for child in module.children():
        for part in sparse_parts(child) if _holds_layers(child) else ():
            if next(part.children(), None) is not None:
                _capture(part, model)


def _is_undone_elsewhere(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether inverse layers outside of a module look for maps by keys of layers within: a graph keeps its maps."""
    within = set(module.modules())
    keys = {getattr(m, "indice_key", None) for m in within if not getattr(m, "inverse", False)} - {None}
    return any(getattr(m, "inverse", False) and m.indice_key in keys for m in model.modules() if m not in within)
