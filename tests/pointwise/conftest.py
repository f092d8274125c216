"""Generated files of these tests go to a folder of their own."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory):
    """Generated files of the tests go to a folder of their own."""
    before = os.environ.get("SPARSECONV_CACHE_DIR")
    os.environ["SPARSECONV_CACHE_DIR"] = str(tmp_path_factory.mktemp("generated"))
    yield
    if before is None:
        os.environ.pop("SPARSECONV_CACHE_DIR")
    else:
        os.environ["SPARSECONV_CACHE_DIR"] = before
