"""Run the notebooks and write them beside their text: python notebooks/execute.py [NUMBER ...].

A notebook is written in its .py file (jupytext, percent format) and read in its .ipynb file. What is kept is small:
scenes to turn are left out, pictures stay, with 128 colours. Anything on stderr is an error: a reader should not meet a
warning.
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
LIMIT = 120  # seconds


def texts(numbers: list[str]) -> list[Path]:
    """The notebooks' texts, all or those whose names begin so."""
    return [
        p
        for p in sorted(HERE.glob("[0-9]*.py"))
        if not numbers or p.name.partition("_")[0] in numbers
    ]


def read(text: Path) -> Any:
    """The notebook of a text, without outputs, with ids that do not change from run to run."""
    notebook = jupytext.read(text)
    for n, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{n}"
    return notebook


def execute(text: Path) -> tuple[Any, float]:
    """The notebook with its outputs, and the seconds it took."""
    notebook = read(text)
    begin = time.perf_counter()
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", store_widget_state=False, record_timing=False,
        coalesce_streams=True, resources={"metadata": {"path": str(HERE)}}, extra_arguments=["--IPKernelApp.log_level=40"],
    )  # fmt: skip
    client.execute()
    seconds = time.perf_counter() - begin
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise RuntimeError(f"{text.name} wrote to stderr:\n{output['text']}")
            if "text" in output:  # files are named as the repository has them
                output["text"] = output["text"].replace(f"{HERE.parent}/", "")
            data = output.get("data", {})
            data.pop("application/vnd.jupyter.widget-view+json", None)
            if "image/png" in data:
                data["image/png"] = smaller(data["image/png"])
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook, seconds


def smaller(encoded: str) -> str:
    """A picture with 128 colours, about a third of its bytes."""
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        few = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    packed = io.BytesIO()
    few.save(packed, "png", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def main(numbers: list[str]) -> int:
    """Run and write them; 1 if one took longer than the limit."""
    slow = 0
    for text in texts(numbers):
        notebook, seconds = execute(text)
        target = text.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        slow += seconds > LIMIT
        print(f"{target.name}: {seconds:.0f} s, {target.stat().st_size / 1024:.0f} KiB")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
