"""The examples of docs/pointwise.md run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

from tests.pointwise.cases import needs_kernels

PAGE = Path(__file__).parents[2] / "docs" / "pointwise.md"


@needs_kernels
def test_the_examples_of_the_page(tmp_path):
    """Triton reads the source of a jitted function, so the examples run from a file."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    path = tmp_path / "page.py"
    path.write_text("\n".join(blocks))
    spec = importlib.util.spec_from_file_location("page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert torch.equal(module.squared_relu(torch.tensor([-1.0, 3.0])), torch.tensor([0.0, 9.0]))
