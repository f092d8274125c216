"""A worker with peers that misbehave: one whose kernel takes the process with it, one that cannot be imported."""

import os
import sys

import torch

from benchmarks import worker
from benchmarks.layers import measure
from sparseconv.bench import implementations
from sparseconv.bench.measure import measure as judged


class Aborts(implementations.Sparseconv):
    """Falls in C code, as a kernel of another library may."""

    name = "aborts"
    devices = ("cpu",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.abort()


class Broken(implementations.Sparseconv):
    """Is installed, and its import raises."""

    name = "broken"
    devices = ("cpu",)
    needs = ("tests.benchmarks.broken_module",)


class Wrong(implementations.Sparseconv):
    """Loses a bit of every sum."""

    name = "wrong"
    devices = ("cpu",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.01


class Raises(implementations.Sparseconv):
    """Raises where it is asked to prepare."""

    name = "raises"
    devices = ("cpu",)

    def prepare(self) -> None:
        raise RuntimeError("no kernel image is available\nand more")


KNOWN = implementations.by_name((*measure.EVERYONE.values(), Aborts, Broken, Wrong, Raises))

if __name__ == "__main__":
    worker.main(sys.argv[1], sys.argv[2], lambda job: judged(job, KNOWN))
