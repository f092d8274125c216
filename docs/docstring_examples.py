"""For mkdocstrings: examples in docstrings become code, and not the quotations that ``>>>`` means in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

BLOCK = re.compile(r"(?:^Examples?::?\n\n?)?(^(?P<indent> *)>>> .*(?:\n(?! *$).+)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Every run of lines that begins with ``>>>``, up to an empty line, between fences.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """

    def block(match: re.Match[str]) -> str:
        lines = (line.removeprefix(match["indent"]) for line in match[1].splitlines())
        return "\n".join(["```pycon", *lines, "```"])

    return BLOCK.sub(block, text)


class FencedExamples(griffe.Extension):
    """Fences the examples of every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
