"""Generated files of these tests go to a folder of their own; where there is a card, they are tests of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.gpu)


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
