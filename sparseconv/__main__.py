"""``python -m sparseconv`` and the ``sparseconv`` command."""

from __future__ import annotations

import os
import sys

import torch


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        from sparseconv.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich", "click"):
            raise
        sys.exit(f"sparseconv: the command line needs {package}: pip install 'sparseconv[demo]'")
    if "OMP_NUM_THREADS" not in os.environ:
        # One core stays free: threads that spin while another process holds their partner's core made a training on a
        # busy machine of two cores ten times slower than one thread alone.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    app()


if __name__ == "__main__":
    main()
