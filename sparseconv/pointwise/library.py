"""Registration with torch.library, which torch.compile, export and tensor subclasses go through."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import torch

from sparseconv.pointwise import derivative, metadata
from sparseconv.pointwise.evaluation import Evaluation, packed

NAMESPACE = "sparseconv_pointwise"
_taken: dict[str, itertools.count[int]] = {}
_lock = threading.Lock()
_SCALAR_NAMES = {float: "float", int: "int", bool: "bool", None: "Scalar"}


def register(function: Evaluation) -> tuple[Any, torch.library.Library]:
    """Make the function an operator of torch; it lives as long as the library that is returned with it.

    Returns:
        the operator, which takes the arguments of the function, and its library.
    """
    schema = function.schema
    name = _unique(schema.name)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    arguments = [
        f"Tensor in{i}" if flag else f"{_SCALAR_NAMES[kind]} in{i}"
        for i, (flag, kind) in enumerate(zip(schema.is_tensor, schema.scalar_types))
    ]
    results = "Tensor" if schema.num_outputs == 1 else "(" + ", ".join(["Tensor"] * schema.num_outputs) + ")"
    library.define(f"{name}({', '.join(arguments)}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args: Any) -> Any:
        metadata.check_devices(schema, args)
        return packed(function.evaluate(args))

    def fake(*args: Any) -> Any:
        device = metadata.check_devices(schema, args)
        return packed(metadata.infer(schema, args).allocate(device))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else [output]
        derivative.keep(ctx, function, inputs, outputs, tuple(ctx.needs_input_grad))

    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(derivative.gradients(ctx, function, grads))

    library.impl(name, run, "CompositeExplicitAutograd")  # on every device
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if function.differentiable:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default, library


def _unique(name: str) -> str:
    """An operator name that is free: names stay the same from run to run, as compiled graphs are cached by them."""
    clean = re.sub(r"\W", "_", name)
    with _lock:
        number = next(_taken.setdefault(clean, itertools.count()))
    return clean if number == 0 else f"{clean}__{number}"
