"""For mkdocs: links that leave docs/ name a file of the repository, which the site does not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """``[text](../path)`` becomes the text and the path. Raises FileNotFoundError where there is no such file."""

    def named(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = (Path(page.file.abs_src_path).parent / link.partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {link}, which is not in the repository")
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)", named, markdown)
