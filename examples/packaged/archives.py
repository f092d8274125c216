"""Files of a package's source distribution, read without unpacking it."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path


def member(archive: Path, ending: str) -> BytesIO:
    """The one file in a .tar.gz whose path ends so."""
    if not archive.is_file():
        raise SystemExit(f"there is no file {archive}: the docstring of this example says how to download it")
    with tarfile.open(archive) as opened:
        names = [name for name in opened.getnames() if name.endswith(ending)]
        if len(names) != 1:
            raise SystemExit(f"{archive} has {len(names)} files that end with {ending}: take the release that is named")
        found = opened.extractfile(names[0])
        assert found is not None
        return BytesIO(found.read())
