"""For mkdocstrings: examples in docstrings become code, and arguments that share a line get a row each."""

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


SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE)


def apart(text: str) -> str:
    """``a, b: words`` as one argument each, so that a reader sees the default of each.

    >>> apart("Args:\\n    a, b: of both.")
    'Args:\\n    a: of both.\\n    b: of both.'
    """

    def rows(match: re.Match[str]) -> str:
        return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))

    head, mark, rest = text.partition("Args:\n")
    arguments, gap, others = rest.partition("\n\n")
    return head + mark + SHARED.sub(rows, arguments) + gap + others


class FencedExamples(griffe.Extension):
    """Prepares every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(apart(obj.docstring.value))
