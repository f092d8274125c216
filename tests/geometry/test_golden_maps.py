"""Every array of small maps has the bits that `golden_maps.json` was written from: by `python -m benchmarks.golden`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.golden import INTERPRETED, SMALL, Hashes, differences, hash_scene, small_scene

GOLDEN = json.loads((Path(__file__).parents[1] / "golden_maps.json").read_text())
ROWS, QUICK = 40, "cube of 3"
SLOW = sorted({case.split(" | ")[0] for case in GOLDEN} - {QUICK})


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter; a card has hashes of its own")
@pytest.mark.parametrize("way", ["eager", "captured"])
@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_arrays_of_a_map_keep_their_bits(name: str, way: str) -> None:
    case, hashes = next(case for case in SMALL if case.name == name), Hashes()
    hash_scene(hashes, name, small_scene(case, ROWS, torch.device("cpu")), case.batch, case, (way,), True)
    want = {key: value for key, value in GOLDEN.items() if key.startswith(f"{name} | ") and key.endswith(f" | {way}")}
    assert hashes.found.keys() == want.keys()
    assert differences(hashes.found, want) == []
