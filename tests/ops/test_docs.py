"""The page about operations runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_examples_on_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
