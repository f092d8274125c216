"""The figures of the README and of docs/benchmarks.md, written from the committed results with their claims.

The README has networks, docs/benchmarks.md has single layers; each between the two marks. They come from
``h100_clients_all.json``, ``h200_gpu.json``, ``h200_dtypes_ours.json`` (first gradients), ``h200_network.json``,
``h200_network_beside_spconv.json``, ``cpu.json`` and ``targets.json``.
The claims in ``benchmarks/claims/claims.json`` are made in the same pass. Claims about the demonstration are written
by hand and stay.
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
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by `python -m benchmarks readme` -->\n", "<!-- until here -->\n"
#: networks: ours; with spconv in one run, of an engine before
NETWORKS, NETWORKS_BESIDE, TARGETS = "h200_network.json", "h200_network_beside_spconv.json", "targets.json"
#: networks of others, unmodified, under both libraries; those that the README shows, as it names them
CLIENTS, CLIENTS_CARD = "h100_clients_all.json", "NVIDIA H100 80GB HBM3"
LIBRARIES = ("spconv", "sparseconv eager", "sparseconv")
CLIENTS_SHOWN = {
    "second": "OpenPCDet, VoxelBackBone8x",
    "second_b8": "the same, eight scans",
    "second_res": "OpenPCDet, VoxelResBackBone8x",
    "centerpoint": "CenterPoint, SpMiddleResNetFHD",
    "mmdet_unet": "mmdetection3d, SparseUNet",
    "spunet": "Pointcept, SpUNet-34C",
    "spunet_b6": "the same, six scans",
    "softgroup": "SoftGroup's U-Net",
}
#: the share by which a figure may be worse when it is measured again; and where the CPU sets the pace, by how much its
#: Python is slower: the same maps took 0.59 and 0.95 ms on two machines with the same GPU
TOLERANCE, HOST_TOLERANCE = 0.15, 0.9
#: what of a network the CPU paces, and the milliseconds of a layer's under which it does
HOSTS, HOST_MS = ("step", "inference", "fixed"), {"map": 1.5, "step": 0.5, "forward": 0.1}
SPCONV = f"{PREFIX}spconv"
#: two cores, ours and spconv's
PROCESSOR = "cpu.json"
#: what is said of a process's first gradients, and where
FIRST, STARTS = ("cold_s", "second_s"), "h200_dtypes_ours.json"
UNITS = {"memory": "MiB", "captured_memory": "MiB", "cold_s": "s", "second_s": "s", "voxels": "", "parameters": ""}

Claim = dict[str, Any]


class Section:
    """Lines of the README, ``lines``, and of the benchmarks' page, ``page``, and the claims that both make."""

    def __init__(self, layers: dict[str, Any], networks: dict[str, Any]) -> None:
        self.claims: list[Claim] = []
        self.card = layers["machine"]["card"]["name"]
        self.layers = stated.rows_of(VERIFIED)
        self.networks = [row for row in networks["rows"] if row["status"] == "measured"]
        packages = layers["machine"]["packages"]
        self.versions = f"torch {packages['torch']}, triton {packages['triton']}"
        self.lines: list[str] = []
        self.page: list[str] = []

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

    def quotient(self, quantity: str, which: str, device: str = "cuda") -> str:
        """The least or the most of theirs over ours, as a claim that follows from the record."""
        name, record, dtype = {
            "cuda": ("best other over ours", _layers_of(quantity), "fp16"),
            "cpu": ("spconv over ours", PROCESSOR, "fp32"),
        }[device]
        asked = {"implementation": name, "case": "", "channels": 0, "dtype": dtype, "device": device}
        claim: Claim = {"name": f"{device}, {quantity}, {which}", "text": f"{which} advantage in {quantity}, {device}"}
        claim |= {"unit": "times", "measure": asked | {"quantity": quantity}, "tolerance": TOLERANCE}
        claim |= {"derived": which, "record": record}
        claim |= {"card": self.card} if device == "cuda" else {}
        figure = stated.recorded(claim) or float("nan")
        claim |= {"stated": f"{figure:#.2g}", "figure": figure}
        self.claims.append(claim)
        return claim["stated"]

    def table(self) -> None:
        """The page's lines: one for each cell of the first table of the targets."""
        self.page += [
            f"One {self.card}, {self.versions}; fp16 with fp32 accumulation; submanifold 3x3x3, rows as given. "
            "Milliseconds, **sparseconv / fastest other**. The others are spconv, spconv-triton, FlexGEMM and "
            "WarpConvNet, measured on the same kind of GPU in November 2026.",
            "",
            "| voxels | C | map | map, captured | forward | step | memory of a step, MiB |",
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
            self.page.append(f"| {title}, {voxels} | {row['channels']} | {' | '.join(cells)} |")
        self.page.append("")

    def sentences(self) -> None:
        """What the page's table comes to, the first gradients of a process, and a CPU."""

        def span(quantity: str, device: str = "cuda") -> str:
            return f"{self.quotient(quantity, 'least', device)} to {self.quotient(quantity, 'most', device)}"

        captured = span("captured_map")
        self.page += [f"In a CUDA graph, a map is {captured} times as fast as the fastest other's.", ""]
        self.lines += [
            "**Single layers** on that GPU, beside the fastest of spconv, spconv-triton, FlexGEMM and WarpConvNet in "
            f"each case: {span('forward')} times as fast forward, {span('step')} times in a training step, "
            f"{span('map')} times for the kernel map ([every layer](docs/benchmarks.md#single-layers)).",
            "",
            f"**On a CPU** with two cores, fp32, beside spconv's CPU wheel: {span('forward', 'cpu')} times as fast "
            f"forward, {span('step', 'cpu')} times in a training step ([CPU](docs/benchmarks.md#on-a-cpu)).",
            "",
        ]
        cold = next(
            (row for row in stated.rows_of(STARTS) if "cold_s" in row and row["implementation"] == "sparseconv"), None
        )
        if cold is not None:
            words = f"first gradient, {_title(cold['case'])}"
            cold_s, second_s = (self.claim(cold, quantity, words) for quantity in ("cold_s", "second_s"))
            self.lines += [
                f"**First call.** Kernels are compiled on first use: the first gradient of a process takes {cold_s} s, "
                f"and {second_s} s once they are in Triton's cache.",
                "",
            ]

    def clients_table(self) -> None:
        """The README's table, a line for each network of somebody else's: spconv's, ours eager and accelerated."""
        columns = {"step": "training step", "inference": "inference", "reserved_mib": "memory of a step, MiB"}
        self.lines += [
            "Milliseconds per call on new scenes, kernel maps included: **spconv / eager / accelerated**. The "
            "networks are the authors' files with the import changed; *accelerated* adds one line, "
            "`sc.accelerate(model)`. The accelerated times are those of the engine before `sc.accelerate` became "
            "`torch.compile`, which is somewhat slower and reserves more memory "
            "([both](docs/performance.md#whole-networks)). A training step is forward, loss and backward of the "
            "sparse backbone, without optimizer and dense head. One H100, "
            "fp16 autocast, PyTorch 2.11, spconv 2.3.8, November 2026; memory is what PyTorch reserves on the GPU.",
            "",
            f"| network | voxels | {' | '.join(columns.values())} |",
            "|---" * (2 + len(columns)) + "|",
        ]
        for client, title in CLIENTS_SHOWN.items():
            voxels = self.of_client("sparseconv", client, title, "voxels")
            cells = []
            for quantity in columns:
                figures = [self.of_client(library, client, title, quantity) or "fails" for library in LIBRARIES]
                cells.append(" / ".join(figures))
            self.lines.append(f"| {title} | {voxels} | {' | '.join(cells)} |")
        self.lines += [
            "",
            "Eager, both libraries are CPU-bound on such scenes, and their times depend on the server. Accelerated, "
            "the network and its kernel maps are replayed as CUDA graphs, which keep memory sized for the largest "
            "scene: see [compiling whole networks](docs/compile.md). spconv finds no fp16 algorithm for SpUNet-34C's "
            "inference.",
            "",
        ]

    def of_client(self, library: str, client: str, title: str, quantity: str) -> str:
        """A figure of a network of somebody else's, as a claim that is held against its record."""
        asked = {"implementation": f"{library}, client", "case": client, "channels": 0, "dtype": "fp16"}
        claim: Claim = {"name": f"{library}, {client}, {quantity}", "text": f"{title}, {library}: {quantity}"}
        claim |= {"unit": {"voxels": "", "reserved_mib": "MiB"}.get(quantity, "ms"), "tolerance": TOLERANCE}
        claim |= {"measure": asked | {"device": "cuda", "quantity": quantity}, "derived": "client", "record": CLIENTS}
        claim |= {"card": CLIENTS_CARD}
        figure = stated.recorded(claim)
        if figure is None:
            return ""
        text = stated.count(int(figure)) if quantity == "voxels" else stated.shown(figure)
        self.claims.append(claim | {"stated": text, "figure": figure})
        return text

    def own_network(self) -> None:
        """A sentence on the U-Net of this library: the least and the most of its steps, and spconv's."""
        ours = [row for row in self.networks if row["implementation"] == f"{PREFIX}sparseconv"]
        theirs = [row for row in stated.rows_of(NETWORKS_BESIDE) if row["implementation"] == SPCONV]

        def span(rows: list[dict[str, Any]], quantity: str) -> str:
            ordered = sorted(rows, key=lambda row: stated.value(row, quantity) or 0.0)
            ends = [self.claim(row, quantity, f"U-Net, {_title(row['case'])}") for row in (ordered[0], ordered[-1])]
            return f"{' to '.join(ends)} ms"

        parameters = self.claim(ours[0], "parameters", "U-Net", text=f"{ours[0]['parameters'] / 1e6:.2f} M")
        self.lines += [
            f"**`nn.UNet`** of {parameters} parameters on one {self.card}: a captured training step takes "
            f"{span(ours, 'captured_step')} on four scans, spconv's {span(theirs, 'step')} "
            "([networks](docs/benchmarks.md#networks)).",
            "",
        ]


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
    found.clients_table()
    found.own_network()
    found.sentences()
    return found


def written(text: str, lines: list[str]) -> str:
    """A page's text with what stands between its marks replaced. Raises ValueError where it has no marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN.strip()} and {END.strip()} around its figures")
    return head + begin + "\n".join(lines) + "\n" + end + tail


def write(readme: Path = README, file: Path = verify.CLAIMS, page: Path = PAGE) -> None:
    """Bring the README, the benchmarks' page and the claims into step with the results."""
    found = section()
    readme.write_text(written(readme.read_text(), found.lines))
    page.write_text(written(page.read_text(), found.page))
    kept = json.loads(file.read_text())
    mine = [claim for claim in kept["claims"] if not claim.get("generated")]
    made = [claim | {"generated": True} for claim in found.claims]
    head = {key: value for key, value in kept.items() if key != "claims"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "claims": [\n'
    file.write_text(text + ",\n".join("  " + json.dumps(claim) for claim in [*mine, *made]) + "\n ]\n}\n")
