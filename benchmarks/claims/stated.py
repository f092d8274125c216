"""Figures as a reader meets them: rounded and written, and found again in the committed results."""

from __future__ import annotations

import json
import re
from typing import Any

import benchmarks
from benchmarks.layers import report
from sparseconv.bench.report import figure

SIZES = {"k": 1e3, "M": 1e6}
#: the run that the README's figures of single layers are of
VERIFIED = "h200_gpu.json"
#: what makes two rows of results the same layer
LAYER = ("case", "channels", "dtype", "kernel")


def shown(value: float) -> str:
    """Three digits.

    >>> shown(1.0038), shown(0.031072), shown(14.057), shown(502.08)
    ('1.00', '0.0311', '14.1', '502')
    """
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def count(value: int) -> str:
    """A number of voxels.

    >>> count(4113056), count(252392)
    ('4.1 M', '252 k')
    """
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k"


def rounds_to(value: float, text: str) -> bool:
    """Whether a value, rounded to the digits of a text, is what the text says.

    >>> rounds_to(1.4513, "1.45"), rounds_to(1.4563, "1.45"), rounds_to(4113056, "4.1 M"), rounds_to(74744, "74,744")
    (True, False, True, True)
    """
    number, _, letter = text.replace(",", "").partition(" ")
    digits = len(number.partition(".")[2])
    scaled = value / SIZES.get(letter, 1.0)
    return abs(scaled - float(number)) <= 0.5000001 * 10.0**-digits


def value(row: dict[str, Any], quantity: str) -> float | None:
    """A row's figure: the median of a time, MiB of memory, or the number itself."""
    if quantity == "captured_memory":
        return row.get("memory", {}).get("captured_mib")
    return figure(row, quantity) if isinstance(row.get(quantity), dict) else row.get(quantity)


def rows_of(record: str) -> list[dict[str, Any]]:
    """The measured rows of a committed file; none where there is no such file."""
    file = benchmarks.RESULTS / record
    if not file.is_file():
        return []
    return [row for row in report.joined(report.read(file)["rows"]) if row["status"] == "measured"]


def recorded(claim: dict[str, Any]) -> float | None:
    """A claim's figure in the file that it was taken from, or None."""
    asked = claim["measure"]
    if claim.get("derived") == "client":
        return of_client(claim["record"], asked)
    if claim.get("derived"):
        derive = beside_spconv if asked["device"] == "cpu" else quotient
        return derive(rows_of(claim["record"]), asked["quantity"], claim["derived"])
    if asked["implementation"] == "best other":
        return best_other(asked["case"], asked["channels"], asked["quantity"])
    for row in rows_of(claim["record"]):
        if _is_usual(row, asked["dtype"]) and row["implementation"] == asked["implementation"]:
            found = _in_row(row, asked["case"], asked["channels"], asked["quantity"])
            if found is not None:
                theirs = _spconvs(row, asked["quantity"])
                return found if theirs is None else min(found, theirs)
    return None


def best_other(case: str, channels: int, quantity: str) -> float | None:
    """The least that a peer took on the targets' GPU: the cell's ``best_other`` in targets.json."""
    name = "map" if quantity in report.MAPS else quantity
    cells = [cell for cell in report.targets()["layers"] if cell["case"] == case and name in cell]
    found = [cell[name]["best_other"] for cell in cells if cell["channels"] == channels or name == "map"]
    return min(found, default=None)


def _spconvs(row: dict[str, Any], quantity: str) -> float | None:
    """What spconv's network took on another GPU of this kind, in another server."""
    if row["implementation"] != "unet:spconv":
        return None
    name = "replay" if quantity == "fixed" else quantity
    cells = [cell for cell in report.targets()["networks"] if cell["case"] == row["case"] and name in cell]
    return cells[0][name]["best_other"] if cells else None


def _is_usual(row: dict[str, Any], dtype: str) -> bool:
    return row["dtype"] == dtype and not row.get("shuffled") and row.get("kernel", 3) == 3


def _in_row(row: dict[str, Any], case: str, channels: int, quantity: str) -> float | None:
    """A row's figure if it is of this case and, but for maps, these channels."""
    same = row["case"] == case and (quantity in report.MAPS or row["channels"] == channels)
    return value(row, quantity) if same else None


def of_client(record: str, asked: dict[str, Any]) -> float | None:
    """A figure of ``benchmarks.clients``: spconv's, ours eager or accelerated; ``voxels`` is the first scene's."""
    library, *eager = asked["implementation"].partition(",")[0].split()
    for run in json.loads((benchmarks.RESULTS / record).read_text())["runs"].values():
        for row in run["rows"]:
            kind = (row["library"], row["client"], row["dtype"], row["accelerated"])
            if kind == (library, asked["case"], asked["dtype"], library == "sparseconv" and not eager):
                found = row.get(asked["quantity"])
                if isinstance(found, dict):
                    return float(found["ms"])
                return found[0] if isinstance(found, list) else found
    return None


def quotient(rows: list[dict[str, Any]], quantity: str, which: str) -> float | None:
    """The ``least`` or the ``most`` over all cells of targets.json: the best other's figure over ours."""
    mine = [row for row in rows if _is_usual(row, "fp16") and row["implementation"] == "sparseconv"]
    found = []
    for cell in report.targets()["layers"]:
        case, channels = cell["case"], cell["channels"]
        ours = next(filter(None, (_in_row(row, case, channels, quantity) for row in mine)), None)
        theirs = best_other(case, channels, quantity)
        if ours and theirs and ("map" if quantity in report.MAPS else quantity) in cell:
            found.append(theirs / ours)
    return {"least": min, "most": max}[which](found) if found else None


def beside_spconv(rows: list[dict[str, Any]], quantity: str, which: str) -> float | None:
    """The ``least`` or the ``most`` of spconv's figure over ours, over all layers that both have in these rows.

    >>> row = {"case": "shell_64", "channels": 32, "dtype": "fp32", "kernel": 3}
    >>> rows = [row | {"implementation": "sparseconv", "step": 2.0}, row | {"implementation": "spconv", "step": 5.0}]
    >>> beside_spconv(rows, "step", "least"), beside_spconv(rows, "forward", "least")
    (2.5, None)
    """

    def of(name: str) -> dict[tuple[Any, ...], float]:
        mine = [row for row in rows if row["implementation"] == name and not row.get("shuffled")]
        figures = {tuple(row.get(key) for key in LAYER): value(row, quantity) for row in mine}
        return {layer: figure for layer, figure in figures.items() if figure}

    ours, theirs = of("sparseconv"), of("spconv")
    quotients: list[Any] = [theirs[layer] / ours[layer] for layer in ours.keys() & theirs.keys()]
    return {"least": min, "most": max}[which](quotients) if quotients else None


def of_demo(log: str) -> dict[str, float]:
    """The figures that ``sparseconv demo`` printed."""

    def number(pattern: str) -> float:
        match = re.search(pattern, log)
        if match is None:
            raise ValueError(f"the demonstration printed nothing like {pattern!r}:\n{log}")
        return float(match[1].replace(",", ""))

    rows = {"dice": "sparse U-Net", "dice of brightness": "brightness alone", "dice of a class": "majority class"}
    scores = {name: number(rf"{words}.*?([0-9.]+)\D*\n") for name, words in rows.items()}
    return {"voxels": number(r"([0-9,]+) voxels"), "parameters": number(r"([0-9,]+) parameters"), **scores}


def numbers(text: str) -> list[str]:
    """The numbers of a text in Markdown, without code, addresses and the digits of names.

    >>> numbers("In 12 ms `a[3]` of 3x3x3, U-Net v2: [0.5](x/y2.md), 7,000 and 11 to 14.")
    ['12', '0.5', '7,000', '11', '14']
    """
    text = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"^(?:    .*|\d+\. )", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "] ", text)
    return re.findall(r"(?<![\w.,-])(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w]|[.,]\d)", text)
