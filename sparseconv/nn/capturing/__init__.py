"""Modules whose calls replay CUDA graphs: forward and backward, for scenes of any size."""

from __future__ import annotations

from typing import Any

from sparseconv.nn.captured_inference import capture as capture_example
from sparseconv.nn.capturing.accelerate import accelerate
from sparseconv.nn.capturing.capture import capture_module, explain, release
from sparseconv.nn.capturing.region import register_layers
from sparseconv.nn.module import SparseModule

__all__ = ["accelerate", "capture", "explain", "release"]

register_layers(SparseModule)


def capture(module: Any, example: Any = None, **options: Any) -> Any:
    if example is None and not options:
        return capture_module(module)
    return capture_example(module, example, **options)


capture.__doc__ = capture_module.__doc__
