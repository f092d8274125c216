"""The README's figures of a card, written from the committed results, and the claims that go with them.

Between the two marks of the README stands what `section` makes of ``h200_gpu.json``, ``h200_dtypes_ours.json``
(first gradients), ``h200_network.json``, ``h200_network_beside_spconv.json``, ``targets.json`` and the peers' rows of
every ``h200_*.json``; the claims about it, in ``benchmarks/claims/claims.json``, are made in the same pass. Claims
without a card are written by hand and stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.claims import stated, verify
from benchmarks.claims.stated import VERIFIED
from benchmarks.layers import report
from benchmarks.layers.scenes import TITLES
from benchmarks.worker import PREFIX

README = ROOT / "README.md"
BEGIN, END = "<!-- written by `python -m benchmarks readme` -->\n", "<!-- until here -->\n"
#: networks: ours; with spconv in one run, of an engine before
NETWORKS, NETWORKS_BESIDE, TARGETS = "h200_network.json", "h200_network_beside_spconv.json", "targets.json"
#: the share by which a figure may be worse when it is measured again; and where the host sets the pace, by how much its
#: Python is slower: the same maps took 0.59 and 0.95 ms on two machines with the same card
TOLERANCE, HOST_TOLERANCE = 0.15, 0.9
#: what of a network the host paces, and the milliseconds of a layer's under which it does
HOSTS, HOST_MS = ("step", "inference", "fixed"), {"map": 1.5, "step": 0.5, "forward": 0.1}
SPCONV = f"{PREFIX}spconv"
#: what is said of a process's first gradients, and where
FIRST, STARTS = ("cold_s", "second_s"), "h200_dtypes_ours.json"
UNITS = {"memory": "MiB", "captured_memory": "MiB", "cold_s": "s", "second_s": "s", "voxels": "", "parameters": ""}

Claim = dict[str, Any]


class Section:
    """Lines of the README and the claims that they make."""

    def __init__(self, layers: dict[str, Any], networks: dict[str, Any]) -> None:
        self.claims: list[Claim] = []
        self.card = layers["machine"]["card"]["name"]
        self.layers = stated.rows_of(VERIFIED)
        self.networks = [row for row in networks["rows"] if row["status"] == "measured"]
        packages = layers["machine"]["packages"]
        self.lines = [
            f"One {self.card}, torch {packages['torch']}, triton {packages['triton']}, fp16 with fp32 sums, "
            "submanifold 3x3x3, rows as given, through autograd as a user calls it. **Milliseconds, ours / the best "
            "other's**: the fastest of spconv, spconv-triton, FlexGEMM and WarpConvNet on such cards in "
            "November 2026. *Map* is from coordinates to all that a training step needs, "
            "*captured*, as a graph that serves every scene; *step* is forward and both gradients. Short eager "
            "figures, maps above all, are the host's pace, and twice as long on some: ours are of one run, in which "
            "what the host was slow for was measured again and the least counts; theirs are the least of all runs.",
            "",
            "![Their time over ours: forward, training step, map](docs/pictures/h200_gpu_relative.png)",
            "",
        ]

    def claim(self, row: dict[str, Any], quantity: str, words: str, whose: str = "", text: str = "") -> str:
        """A figure as the README shows it, kept as a claim."""
        name = whose or row["implementation"]
        keys = {key: row[key] for key in ("case", "channels", "dtype", "device")}
        asked = {"implementation": name, **keys, "quantity": quantity}
        network = NETWORKS_BESIDE if name == SPCONV else NETWORKS
        record = network if name.startswith(PREFIX) else _layers_of(quantity)
        claim: Claim = {
            "name": f"{name}, {row['case']}, {row['channels']}, {quantity}",
            "text": f"{words}: {quantity}" + (f" of the {whose}" if whose else ""),
            "unit": UNITS.get(quantity, "ms"),
            "measure": asked,
            "tolerance": HOST_TOLERANCE if _is_paced_by_the_host(row, quantity) else TOLERANCE,
            "record": TARGETS if whose else record,
            "card": self.card,
        }
        if quantity in verify.EXACT:  # counted anywhere
            claim |= {"tolerance": 0.0, "measure": asked | {"device": "cpu", "dtype": "fp32"}}
            if quantity == "parameters":  # of any scene: the smallest
                claim["measure"] |= {"case": "shell_16"}
            del claim["record"], claim["card"]
            figure = row[quantity]
        else:
            found = stated.recorded(claim)
            if found is None:
                return ""
            figure = found
        claim["stated"] = text or stated.shown(figure)
        claim["figure"] = figure
        self.claims.append(claim)
        return claim["stated"]

    def quotient(self, quantity: str, which: str) -> str:
        """The least or the most of theirs over ours, as a claim that follows from the table."""
        record = _layers_of(quantity)
        figure = stated.quotient(stated.rows_of(record), quantity, which) or float("nan")
        asked = {"implementation": "best other over ours", "case": "", "channels": 0, "dtype": "fp16", "device": "cuda"}
        claim: Claim = {"name": f"{quantity}, {which}", "text": f"{which} advantage in {quantity}", "unit": "times"}
        claim |= {"measure": asked | {"quantity": quantity}, "tolerance": TOLERANCE, "derived": which}
        claim |= {"record": record, "card": self.card, "stated": f"{figure:.2g}", "figure": figure}
        self.claims.append(claim)
        return claim["stated"]

    def table(self) -> None:
        """A line a cell of the first table of the targets."""
        self.lines += [
            "| voxels | C | map | the same, captured | forward | step | step's memory, MiB |",
            "|---|---|---|---|---|---|---|",
        ]
        before = ""
        for cell in report.targets()["layers"]:
            key = (cell["case"], cell["channels"], "fp16")
            found = [r for r in self.layers if (r["case"], r["channels"], r["dtype"]) == key]
            row = next((r for r in found if not r.get("shuffled") and r.get("kernel", 3) == 3), None)
            if row is None:
                continue
            title = _title(cell["case"])
            voxels = stated.count(row["voxels"])
            first, before = cell["case"] != before, cell["case"]
            if first:
                self.claim(row, "voxels", title, text=voxels)
            cells = []
            for quantity in (*report.MAPS, "forward", "step", "memory"):
                if quantity in report.MAPS and not first:  # a map knows no channels
                    cells.append("")
                    continue
                words = f"{title}, {voxels}, C {row['channels']}"
                both = [self.claim(row, quantity, words)]
                both += [self.claim(row, quantity, words, "best other")] if quantity != "captured_map" else []
                cells.append(" / ".join(part for part in both if part))
            self.lines.append(f"| {title}, {voxels} | {row['channels']} | {' | '.join(cells)} |")
        self.lines.append("")

    def sentences(self) -> None:
        """What the table comes to, and the first gradients of a process."""
        spans = [
            f"{quantity.replace('_', ' ')} {self.quotient(quantity, 'least')} to {self.quotient(quantity, 'most')}"
            for quantity in ("forward", "step", *report.MAPS)
        ]
        said = f"The best other's time over ours: {', '.join(spans)}."
        cold = next(
            (row for row in stated.rows_of(STARTS) if "cold_s" in row and row["implementation"] == "sparseconv"), None
        )
        if cold is not None:
            words = f"first gradient, {_title(cold['case'])}"
            cold_s, second_s = (self.claim(cold, quantity, words) for quantity in ("cold_s", "second_s"))
            said += f" The first gradient of a process with empty caches comes after {cold_s} s, "
            said += f"of a second process after {second_s} s."
        self.lines += [said, ""]

    def networks_table(self) -> None:
        """A line a scan: our network and spconv's."""
        ours = [row for row in self.networks if row["implementation"] == f"{PREFIX}sparseconv"]
        theirs = {row["case"]: row for row in stated.rows_of(NETWORKS_BESIDE) if row["implementation"] == SPCONV}
        if not ours:
            return
        parameters = self.claim(ours[0], "parameters", "U-Net", text=f"{ours[0]['parameters'] / 1e6:.2f} M")
        columns = {
            "step, new scan": ("captured_step", "step"),
            "inference, new scan": ("captured_inference", "inference"),
            "inference, known geometry": ("replay", "fixed"),
            "step's memory, MiB": ("captured_memory", "memory"),
            "MiB without a graph": ("memory", ""),
        }
        self.lines += [
            f"A U-Net of {parameters} parameters, milliseconds, ours / spconv's: the less of its figures on two "
            "such cards. A *new scan* builds all its maps; ours is one CUDA graph that serves every "
            "scan (`nn.capture_step`, `nn.capture`) and has room for a quarter more voxels. Without a graph the host's "
            "Python sets the pace of both, and ours is the faster one on the same host: "
            "[networks](benchmarks/results/h200_network_beside_spconv.json).",
            "",
            f"| scan | {' | '.join(columns)} |",
            "|---" * (1 + len(columns)) + "|",
        ]
        for row in ours:
            words = f"U-Net, {_title(row['case'])}"
            cells = []
            for quantity, other in columns.values():
                found = theirs.get(row["case"])
                both = [self.claim(row, quantity, words) or "-"]
                both += [self.claim(found, other, f"{words}, spconv")] if found and other else []
                cells.append(" / ".join(both))
            self.lines.append(f"| {_title(row['case'])}, {stated.count(row['voxels'])} | {' | '.join(cells)} |")
            if not any(claim["name"].startswith(f"sparseconv, {row['case']},") for claim in self.claims):
                self.claim(row, "voxels", _title(row["case"]), text=stated.count(row["voxels"]))
        self.lines.append("")


def _layers_of(quantity: str) -> str:
    return STARTS if quantity in FIRST else VERIFIED


def _is_paced_by_the_host(row: dict[str, Any], quantity: str) -> bool:
    if quantity in FIRST:  # compilers
        return True
    if row["implementation"].startswith(PREFIX):
        return quantity in HOSTS
    return quantity in HOST_MS and (stated.value(row, quantity) or HOST_MS[quantity]) < HOST_MS[quantity]


def _title(case: str) -> str:
    return TITLES.get(case) or case.partition("_")[0].replace("shell", "sphere's shell")


def section() -> Section:
    """The section of the committed results."""
    found = Section(report.read(RESULTS / VERIFIED), report.read(RESULTS / NETWORKS))
    found.table()
    found.sentences()
    found.networks_table()
    return found


def written(text: str, lines: list[str]) -> str:
    """A README's text with what stands between its marks replaced. Raises ValueError where it has no marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README needs the lines {BEGIN.strip()} and {END.strip()} around its figures")
    return head + begin + "\n".join(lines) + "\n" + end + tail


def write(readme: Path = README, file: Path = verify.CLAIMS) -> None:
    """Bring the README and the claims into step with the results."""
    found = section()
    readme.write_text(written(readme.read_text(), found.lines))
    kept = json.loads(file.read_text())
    mine = [claim for claim in kept["claims"] if not claim.get("generated")]
    made = [claim | {"generated": True} for claim in found.claims]
    head = {key: value for key, value in kept.items() if key != "claims"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "claims": [\n'
    file.write_text(text + ",\n".join("  " + json.dumps(claim) for claim in [*mine, *made]) + "\n ]\n}\n")
