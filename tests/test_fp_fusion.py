"""Kernels are compiled with fused products and sums, whatever Triton's default: bits and speed depend on it."""

from __future__ import annotations

import ast
from pathlib import Path

import sparseconv

ROOT = Path(sparseconv.__file__).parent


def launches(tree):
    """What is said in calls and options that say how many warps a kernel has; `Launcher` and `Config` launch later."""
    for node in ast.walk(tree):
        said = set()
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in ("Launcher", "Config"):
            said = {keyword.arg for keyword in node.keywords}
        elif isinstance(node, ast.Dict):
            said = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if "num_warps" in said:
            yield said


def test_every_launch_pins_it():
    texts = [path.read_text() for path in ROOT.rglob("*.py")]
    found = [keys for text in texts if "num_warps" in text for keys in launches(ast.parse(text))]
    assert len(found) >= 8
    assert all("enable_fp_fusion" in keys for keys in found)
