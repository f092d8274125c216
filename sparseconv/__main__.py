"""``python -m sparseconv`` and the ``sparseconv`` command."""

from __future__ import annotations

import sys

WITHOUT = """sparseconv: this command needs {package}: pip install 'sparseconv[cli]'
Without it there are: sparseconv info, sparseconv --version"""
HELP = """Usage: sparseconv COMMAND

  info        what is installed, and which backends can run here
  --version   the version

With {package}, pip install 'sparseconv[cli]': demo, bench, convert, compile, export
"""


def main() -> None:
    """Run the command line; Ctrl-C ends it with a word and status 130, also while modules are imported."""
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)


def _run(asked: list[str]) -> None:
    """What a bug report needs, ``info`` and ``--version``, needs nothing but the package."""
    if asked == ["--version"]:
        import sparseconv

        sys.stdout.write(f"sparseconv {sparseconv.__version__}\n")
    elif asked == ["info"]:
        from sparseconv.info import text

        sys.stdout.write(f"{text()}\n")
    else:
        try:
            from sparseconv.cli import app
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in ("typer", "rich", "click"):
                raise
            if asked in ([], ["--help"]):
                sys.stdout.write(HELP.format(package=package))
                return
            sys.exit(WITHOUT.format(package=package))
        app()


if __name__ == "__main__":
    main()
