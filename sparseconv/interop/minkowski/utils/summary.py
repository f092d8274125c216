"""A network's layers, the shapes that they give, and their parameters."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from sparseconv.kinds import check_kind

#: a module, the shapes that it gave, its own parameters
Row = tuple[str, str, int]


def summary(model: torch.nn.Module, summary_input: Any) -> tuple[int, int]:
    """Print the modules that a call goes through, in the order of their results, and the numbers of parameters.

    Args:
        model: any module; it is called once, in the mode in which it is.
        summary_input: what it takes.

    Returns:
        (parameters, parameters that are trained), each counted once.
    """
    text, counts = minkowski_summary_string(model, summary_input)
    sys.stdout.write(text)
    return counts


def minkowski_summary_string(model: torch.nn.Module, summary_input: Any) -> tuple[str, tuple[int, int]]:
    """The text of `summary`, and what it returns.

    >>> text, counts = minkowski_summary_string(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.zeros(1, 2))
    >>> counts, text.splitlines()[2].split()
    ((9, 9), ['Linear-1', '(1,', '3)', '9'])
    """
    check_kind("model", model, torch.nn.Module, "pass a module, as torch.nn.Sequential(...)")
    rows: list[Row] = []
    watched = [m for m in model.modules() if not isinstance(m, (torch.nn.Sequential, torch.nn.ModuleList))]
    hooks = [module.register_forward_hook(partial(_seen, rows)) for module in watched]
    try:
        with torch.no_grad():
            model(summary_input)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    lines = [f"{'module':<40} {'output':>24} {'parameters':>12}", "-" * 78]
    lines += [f"{name:<40} {shape:>24} {count:>12,}" for name, shape, count in rows]
    lines += ["-" * 78, f"{total:,} parameters, of which {trained:,} are trained"]
    return "\n".join(lines) + "\n", (total, trained)


def _seen(rows: list[Row], module: torch.nn.Module, _: Any, output: Any) -> None:
    given = output if isinstance(output, (list, tuple)) else [output]
    shapes = [str(tuple(each.shape)) if hasattr(each, "shape") else type(each).__name__ for each in given]
    own = sum(p.numel() for p in module.parameters(recurse=False))
    rows.append((f"{type(module).__name__}-{len(rows) + 1}", ", ".join(shapes), own))
