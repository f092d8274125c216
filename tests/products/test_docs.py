"""The uses in docs/products.md run, and say what they claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "products.md").read_text()
USES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_there_are_five():
    assert len(USES) == 5


@pytest.mark.parametrize("use", USES, ids=range(len(USES)))
def test_a_use_runs(use):
    assert len(use.strip().splitlines()) <= 13
    exec(compile(use, "docs/products.md", "exec"), {})
