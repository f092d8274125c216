"""Modules made of single files, and stand-ins for what these import of their packages."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def module(name: str, path: Path | None = None, **attributes: Any) -> Any:
    """A module made of one file, so that a client needs nothing of its package but what is stood in for."""
    made: Any = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(attributes)
    sys.modules[name] = made
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], made)
    if path is not None:
        made.__package__ = name.rpartition(".")[0]
        exec(compile(path.read_text(), str(path), "exec"), made.__dict__)
    return made


def unless_installed(name: str, **attributes: Any) -> None:
    """A stand-in for a module that is not here."""
    try:
        importlib.import_module(name)
    except ImportError:
        module(name, **attributes)


class Registry:
    """A registry of classes by name, with the three ways in which clients fill theirs."""

    def __init__(self) -> None:
        self.kinds: dict[str, type] = {}

    def register_module(self, kind: Any = None, *_: Any, **__: Any) -> Any:
        """``@register_module``, ``@register_module()`` and ``@register_module("name")``."""
        return kind if isinstance(kind, type) else lambda kind: kind

    def _register_module(self, kind: type, name: str, force: bool = False) -> None:
        self.kinds[name] = kind


def norm_layer(cfg: dict[str, Any], channels: int) -> tuple[str, torch.nn.Module]:
    """``build_norm_layer`` of det3d and mmcv, for norms of rows."""
    options = {key: value for key, value in cfg.items() if key != "type"}
    if cfg["type"] not in ("BN1d", "naiveSyncBN1d"):
        raise ValueError(f"no stand-in for a norm of type {cfg['type']}")
    return "bn", torch.nn.BatchNorm1d(channels, **options)


def conv_layer(registry: Registry) -> Callable[..., torch.nn.Module]:
    """``build_conv_layer`` of mmcv: the class by its name, with the other options of the configuration."""

    def build(cfg: dict[str, Any], *args: Any, **kwargs: Any) -> torch.nn.Module:
        options = {key: value for key, value in cfg.items() if key != "type"}
        built: torch.nn.Module = registry.kinds[cfg["type"]](*args, **kwargs, **options)
        return built

    return build
