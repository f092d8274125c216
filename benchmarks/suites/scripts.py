"""Tests that are scripts: each statement of their last block is one test, and their scenes are cut to a CPU's size."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

#: the largest edge of a scene, channels and batch items
MOST = {"RES": 16, "C": 16, "B": 2}
#: the mean error that is let pass: of fp16 numbers near 1
MEAN = 0.01


class _Cut(ast.NodeTransformer):
    """Cuts sizes in ``{"RES": 512, ...}`` and in ``RES = [1, 2, ...]``, and repetitions in ``range(110)``."""

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and key.value in MOST and isinstance(value, ast.Constant):
                value.value = min(int(str(value.value)), MOST[key.value])
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if ast.unparse(node.targets[0]) == "RES" and isinstance(node.value, ast.List):
            node.value.elts = [e for e in node.value.elts if int(ast.unparse(e)) <= MOST["RES"]]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node) == "range(110)":
            return ast.parse("range(12)", mode="eval").body
        return self.generic_visit(node)


class Statement(pytest.Item):
    """A statement of a script's last block, after the script."""

    def __init__(self, tree: ast.Module, number: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tree, self.number = tree, number

    def runtest(self) -> None:
        """Runs it; errors that the script would print alone are held to `MEAN`."""
        sys.path.insert(0, str(self.path.parent))
        means: list[float] = []
        names: dict[str, Any] = {"__name__": "script", "__file__": str(self.path)}
        try:
            exec(compile(ast.Module(self.tree.body[:-1], []), str(self.path), "exec"), names)
            measure: Any = names.get("calc_err")

            def recorded(*given: Any) -> Any:
                worst = measure(*given)
                means.append(worst[1])
                return worst

            names["calc_err"] = recorded
            if "benchmark_kernel" in names:
                names["benchmark_kernel"] = partial(names["benchmark_kernel"], num_warmup=0, num_iters=1)
            last: Any = self.tree.body[-1]
            exec(compile(ast.Module([last.body[self.number]], []), str(self.path), "exec"), names)
        finally:
            sys.path.remove(str(self.path.parent))
        assert all(mean <= MEAN for mean in means), f"the largest mean error is {max(means)}"


class Script(pytest.File):
    def collect(self) -> Iterator[Statement]:
        tree = _Cut().visit(ast.parse(self.path.read_text()))
        last = tree.body[-1]
        for number in range(len(last.body)):
            yield Statement.from_parent(self, name=f"statement {number + 1}", tree=tree, number=number)
