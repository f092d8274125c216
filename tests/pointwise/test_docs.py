"""The examples of docs/pointwise.md and of the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import sparseconv.pointwise
from tests.pointwise.cases import needs_kernels

PAGE = Path(__file__).parents[2] / "docs" / "pointwise.md"
MODULES = [
    module.name
    for module in pkgutil.walk_packages(sparseconv.pointwise.__path__, "sparseconv.pointwise.")
    if ".scalars" not in module.name
]


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


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
