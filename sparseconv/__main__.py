"""``python -m sparseconv`` and the ``sparseconv`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        from sparseconv.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich", "click"):
            raise
        sys.exit(f"sparseconv: the command line needs {package}: pip install 'sparseconv[demo]'")
    app()


if __name__ == "__main__":
    main()
