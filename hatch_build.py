"""The README as a package index shows it: links and pictures lead to the repository, which the environment names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_the_index(text: str, repository: str, version: str) -> str:
    """The README with absolute links: pictures as files, all else as pages of a release, and the address to clone.

    >>> for_the_index("![a](docs/a.png) [b](docs/b.md#c) [d](https://e.org)", "owner/name", "1.0")
    '![a](https://raw.githubusercontent.com/owner/name/v1.0/docs/a.png) \
[b](https://github.com/owner/name/blob/v1.0/docs/b.md#c) [d](https://e.org)'
    >>> for_the_index("[![a](https://e.org/a.png)](LICENSE)", "owner/name", "1.0")
    '[![a](https://e.org/a.png)](https://github.com/owner/name/blob/v1.0/LICENSE)'
    """
    text = text.replace("<address of this repository>", f"https://github.com/{repository}")

    def whole(match: re.Match[str]) -> str:
        mark, words, path = match.groups()
        pages, files = f"https://github.com/{repository}/blob", f"https://raw.githubusercontent.com/{repository}"
        return f"{mark}[{words}]({files if mark else pages}/v{version}/{path})"

    words = r"(?:!\[[^\]]*\]\([^)]*\)|[^\]])*"  # among them a badge, which is a picture with an address of its own
    return re.sub(rf"(!?)\[({words})\]\((?![a-z]+:|#)([^)\s]+)\)", whole, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in readme and urls. SPARSECONV_REPOSITORY is ``owner/name``; without it links stay relative."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("SPARSECONV_REPOSITORY", "")
        if repository:
            text = for_the_index(text, repository, metadata["version"])
            home = f"https://github.com/{repository}"
            metadata["urls"] = {"Repository": home, "Issues": f"{home}/issues"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
