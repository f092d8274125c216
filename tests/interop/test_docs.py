"""The pages about other libraries name what there is, and their figures are the networks'."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparseconv.interop import LAYOUTS
from sparseconv.nn.models.convnext import ConvNeXtUNet
from sparseconv.nn.models.minkunet import MinkUNet
from sparseconv.nn.models.resnet import ResNet
from sparseconv.nn.models.second import SecondEncoder, VoxelResBackBone8x
from sparseconv.nn.models.spunet import SpUNet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "interop.md", ROOT / "docs" / "checkpoints.md", *(ROOT / "docs" / "projects").glob("*.md")]
PAGE = "\n".join(page.read_text() for page in PAGES)
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_names_every_layout():
    assert [name for name in LAYOUTS if f"`{name}`" not in PAGE] == []


def test_the_pages_figures():
    with torch.device("meta"):
        for net, figure in (
            (MinkUNet(3, 20), "37.86 M"),
            (ResNet(3, 40), "40.27 M"),
            (SpUNet(6, 20), "39.16 M"),
            (SecondEncoder(4, (41, 1600, 1408)), "0.712 M"),
            (VoxelResBackBone8x(5, (41, 1440, 1440)), "2.695 M"),
            (ConvNeXtUNet(4, 20), "6.69 M"),
        ):
            count = sum(p.numel() for p in net.parameters()) / 1e6
            digits = len(figure.split()[0].split(".")[1])
            assert f"{count:.{digits}f} M" == figure
            assert figure in PAGE


def test_the_pages_tables_are_the_records():
    for row in json.loads((RESULTS / "cpu_suites.json").read_text())["rows"]:
        assert f"| {row['collected']} | {row['passed']} |" in PAGE, row["suite"]
        assert "UNEXPLAINED" not in row["why"]
    for row in json.loads((RESULTS / "cpu_drop_ins.json").read_text())["rows"]:
        output = max(row["output"], row["evaluated"])
        assert f"| {row['parameters'] / 1e6:.1f} M | {output:.1e} | {row['gradient']:.1e} |" in PAGE, row["name"]
        assert row["gradient"] < 1e-12
