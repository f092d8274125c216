"""``python -m benchmarks.streaming_model``: what a streamed pass takes on 1 to 1,024 cards, by its parts.

    T(R) = begin + b N / R + h N / R max(t, link, threads, host memory, files) + last block out

A voxel of the scene is counted and sorted in ``b`` seconds, computed in ``t``, and ``h`` times with surroundings. It
takes ``4 (1 + D) + s C_in`` bytes to the card, ``h`` times, and ``s C_out`` back. Host memory carries each byte three
times a way: read, written to pinned memory, and read by the card. The cards of a host share its memory. The threads of
a rank that read and write rows take their own time. Results of several ranks lie in files, whose new pages a host gives
out at one pace to all of its ranks. A rank holds a block of its budget at least, so ranks beyond N times the bytes of a
voxel over the budget have nothing to do.

With ``--measured FILE`` (what ``benchmarks.streaming --out`` wrote) measured rows stand beside their predictions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Costs:
    """Of one network on one kind of host. Seconds and bytes a voxel; links in bytes a second."""

    begin: float = 0.25  # recording, planning: the same on every rank
    sort: float = 1.6e-9
    compute: float = 3.2e-9
    threads: float = 6.6e-9  # of one rank, 16 cores
    surroundings: float = 1.1
    bytes_in: float = 16 + 2 * 4
    bytes_out: float = 2 * 20
    bytes_on_card: float = 2400
    budget: float = 4e9
    link: float = 50e9  # PCIe 5 x16, pinned, as its makers state it
    host: float = 300e9  # of one host's memory
    files: float = 3.1e9  # bytes a second of new pages in /dev/shm, of one host
    cards: int = 8  # of one host

    def parts(self, voxels: float, ranks: int) -> dict[str, float]:
        """Seconds of a pass, and what bounds it."""
        busy = min(ranks, max(1, int(voxels * self.bytes_on_card / self.budget)))
        moved = self.surroundings * self.bytes_in + self.bytes_out
        each = {
            "compute": self.surroundings * self.compute,
            "link": max(self.surroundings * self.bytes_in, self.bytes_out) / self.link,
            "threads": self.threads,
            "host memory": 3 * moved * min(ranks, self.cards) / self.host,
            "files": self.bytes_out * min(ranks, self.cards) / self.files if ranks > 1 else 0.0,
        }
        block = min(voxels / busy, self.budget / self.bytes_on_card)
        return {
            "beginning": self.begin + self.sort * voxels / ranks,
            "blocks": voxels / busy * max(each.values()),
            "last out": block * self.bytes_out / self.link,
            **{name: voxels / busy * seconds for name, seconds in each.items()},
        }

    def seconds(self, voxels: float, ranks: int) -> float:
        parts = self.parts(voxels, ranks)
        return parts["beginning"] + parts["blocks"] + parts["last out"]


def main(
    voxels: Annotated[float, typer.Option(help="Of the scene.")] = 10e9,
    measured: Annotated[Path | None, typer.Option(help="JSON of benchmarks.streaming.")] = None,
) -> None:
    costs = Costs()
    print(f"{voxels:,.0f} voxels")
    print("cards   seconds  beginning   compute      link   threads host memory  files  against one")
    for ranks in (1, 2, 4, 8, 64, 256, 1024):
        parts, one = costs.parts(voxels, ranks), costs.seconds(voxels, 1)
        took = costs.seconds(voxels, ranks)
        columns = (parts[name] for name in ("beginning", "compute", "link", "threads", "host memory", "files"))
        print(f"{ranks:5} {took:9.2f} " + " ".join(f"{value:9.2f}" for value in columns) + f" {one / took:9.1f}")
    for name, row in (json.loads(measured.read_text())["results"] if measured else {}).items():
        predicted = costs.seconds(row["voxels"], row["ranks"])
        print(f"{name}: {row['voxels']:,} voxels, measured {row['seconds']:.2f} s, predicted {predicted:.2f} s")


if __name__ == "__main__":
    typer.run(main)
