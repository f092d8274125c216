"""The examples are scripts: their folder is where they find each other."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))
pytest.importorskip("typer", reason="the recipes' command lines need the extra cli")
