"""A bad call: one that works, with an argument of a wrong kind, which must be refused in words.

An entry of a table is a call that works. A case takes one, replaces an argument by a kind that it does not take, and
expects ValueError, TypeError or MemoryError with a sentence. Anything else is wrong, an answer too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import sparseconv as sc

REFUSALS = (ValueError, TypeError, MemoryError)

Kinds = dict[str, Callable[[], Any]]
#: kinds that an argument may turn out to be, by name
WRONG: Kinds = {
    "none": lambda: None,
    "list": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "ragged list": lambda: [[1], [2, 3]],
    "list of strings": lambda: ["a", "b"],
    "ndarray": lambda: np.ones((3, 4), dtype=np.float32),
    "string": lambda: "banana",
    "bytes": lambda: b"banana",
    "float": lambda: 2.5,
    "nan": lambda: float("nan"),
    "negative": lambda: -3,
    "huge": lambda: 10**30,
    "complex": lambda: 1j,
    "dict": lambda: {"a": 1},
    "set": lambda: {3},
    "object": object,
    "function": lambda: len,
    "type": lambda: int,
    "dtype": lambda: torch.float64,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    "strided nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
    "complex tensor": lambda: torch.ones(4, 4, dtype=torch.complex64),
    "bool tensor": lambda: torch.ones(4, 4, dtype=torch.bool),
    "meta tensor": lambda: torch.ones(4, 4, device="meta"),
    "other shape": lambda: torch.ones(7, 1, 3),
    "scalar tensor": lambda: torch.tensor(1.5),
    "sparse tensor": lambda: sc.SparseTensor(GRID, torch.ones(len(GRID), 4)),
    "grid": lambda: GRID,
    "plan": lambda: PLAN,
    "module": lambda: torch.nn.ReLU(),
}

COORDS = torch.nn.functional.pad(torch.unique(torch.randint(0, 5, (60, 3)), dim=0), (1, 0)).int()
GRID = sc.VoxelGrid(COORDS)
PLAN = sc.ConvolutionPlan(GRID, 3)


@dataclass(frozen=True)
class Call:
    """A call that works: the arguments that are drawn from, and the kinds that each of them takes."""

    name: str
    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    takes: dict[str, str]


def call(name: str, function: Callable[..., Any], good: Callable[[], dict[str, Any]], **takes: str) -> Call:
    """``takes`` names, separated by commas, the kinds that are right for an argument beside the good one."""
    return Call(name, function, good, takes)


def by_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function called with its arguments by place, in the order in which they are given."""
    return lambda **given: function(*given.values())


def check(entry: Call, argument: str, kind: str, kinds: Kinds = WRONG) -> str:
    """What is wrong with the answer to this bad call; nothing where it is refused in a sentence."""
    given = entry.good() | {argument: kinds[kind]()}
    case = f"{entry.name}({argument}={kind})"
    try:
        entry.function(**given)
    except REFUSALS as error:
        text = str(error)
        return "" if len(text.split()) >= 4 else f"{case}: {type(error).__name__} without a sentence: {text!r}"
    except BaseException as error:
        return f"{case}: {type(error).__name__}: {str(error)[:120]!r}"
    return f"{case}: accepted"


def cases(table: Sequence[Call], kinds: Kinds = WRONG) -> list[tuple[Call, str, str]]:
    """Every bad call of a table."""
    return [
        (entry, argument, kind)
        for entry in table
        for argument in entry.good()
        for kind in kinds
        if kind not in entry.takes.get(argument, "").split(",")
    ]


def wrong_answers(table: Sequence[Call], count: int, seed: int, kinds: Kinds = WRONG) -> list[str]:
    """Draw ``count`` bad calls, each once at most; return what is wrong with their answers."""
    every = cases(table, kinds)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    return [wrong for wrong in (check(*case, kinds) for case in drawn) if wrong]
