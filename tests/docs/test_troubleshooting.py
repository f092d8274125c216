"""The headings of the page on troubleshooting are what the library says."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.gpu.cuda_capability import check_kernels, refusal
from sparseconv.interop import load, read

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r'^### "(.+)"$', (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
GRID, _ = sc.voxelize(torch.tensor([[0.1, 0.2], [1.2, 0.4], [2.7, 0.3]]), 1.0)
PLAN = sc.ConvolutionPlan(GRID, 3)
TENSOR = sc.SparseTensor(GRID, torch.zeros(3, 2))


def _old_card(_):
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Tesla V100"),
    ):
        refusal.cache_clear()
        check_kernels(torch.device("cuda", 99), "a CUDA graph of a network")


def _pickled(folder: Path) -> None:
    torch.save({"model": Path}, folder / "whole.pth")
    read(folder / "whole.pth")


#: what to do to see a message, by how its heading begins
SEEN = {
    "coords must be (N, 1+D)": lambda _: sc.VoxelGrid(torch.zeros(3, dtype=torch.int32)),
    "batch items": lambda _: sc.VoxelGrid(torch.tensor([[-3, 1, 1]])),
    "SparseTensor.from_list": lambda _: sc.VoxelGrid([torch.zeros(1, 3).int()] * 2),
    "coords must be integers": lambda _: sc.VoxelGrid(torch.rand(3, 4)),
    "rows 0 and 1": lambda _: sc.VoxelGrid(torch.tensor([[0, 1, 1], [0, 1, 1]])),
    "point 0 is": lambda _: sc.voxelize(torch.tensor([[float("nan"), 0.0]]), 1.0),
    "a voxel size of": lambda _: sc.voxelize(torch.tensor([[1e12, 0.0]]), 1.0),
    "points are torch.float16": lambda _: sc.voxelize(torch.tensor([[900.0, 0.0]]).half(), 0.1),
    "the two tensors": lambda _: TENSOR.cat(sc.SparseTensor(GRID.subset(torch.arange(3) < 2), torch.zeros(2, 2))),
    "the way back": lambda _: nn.InverseConv(2, 2, 2, stride=2, rank=2)(TENSOR),
    "x is torch.bfloat16": lambda _: PLAN.execute(torch.zeros(3, 2).bfloat16(), torch.zeros(9, 2, 1)),
    "SubmanifoldConv takes": lambda _: nn.SubmanifoldConv(2, 4, 3, rank=2)(torch.zeros(3, 2)),
    "got an unexpected": lambda _: nn.SubmanifoldConv(2, 4, 3, indice_key="a"),
    "these are no weights": lambda _: load(nn.SubmanifoldConv(2, 4, 3), {"kernel": torch.zeros(9, 2, 4)}, "spconv"),
    "the checkpoint does not fit": lambda _: load(
        nn.SubmanifoldConv(2, 4, 3), {"other.weight": torch.zeros(4, 3, 3, 3, 2)}, "spconv"
    ),
    "holds more than tensors": _pickled,
    "has compute capability": _old_card,
    "torch's sum mixes": lambda _: torch.sum(TENSOR),
}
#: messages that only a card, or a reader without Triton's interpreter, brings about: their folders
IN_FILES = {
    "runs on CUDA devices, not on cpu": "backends/triton_implicit_gemm",
    "a scene before this call did not fit what was captured, and its result is NaN": "nn",
    "the rows that are no voxels change the network's result": "nn",
}


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_is_what_the_library_says(heading, tmp_path):
    if heading in IN_FILES:
        folder = ROOT / "sparseconv" / IN_FILES[heading]
        written = heading.removesuffix("cpu")  # the device is put in
        assert any(written in path.read_text() for path in folder.glob("*.py"))
        return
    (run,) = (run for start, run in SEEN.items() if heading.startswith(start))
    with pytest.raises((TypeError, ValueError)) as error:
        run(tmp_path)
    parts = [part.strip() for part in heading.split("...")]
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


def test_every_case_has_its_heading():
    starts = [*SEEN, *IN_FILES]
    assert [start for start in starts if not any(heading.startswith(start) for heading in HEADINGS)] == []
