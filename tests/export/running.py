"""Programs that tests of packages run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
needs_a_compiler = pytest.mark.skipif(bool(TOOLS), reason=f"not installed: {TOOLS}")


def run(*command, expect=0):
    """What a program said, which must end with this code."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == expect, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr
