"""The backend that docs/extending.md shows passes what every backend passes, as it stands in the document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sparseconv.backends import registry
from tests.backends import test_every_backend as every
from tests.cases import CASES, Case, named

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
if not DOCUMENT.exists():
    pytest.skip("the documents are not shipped with the tests", allow_module_level=True)
#: a sum over edges in Python waits for each: more of them show nothing new
SMALL = [Case(**{**case.__dict__, "voxels": min(case.voxels, 40)}) for case in CASES]
NAME = "edge_by_edge"


code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
exec(compile(code, str(DOCUMENT), "exec"), made := {})
made = made["EdgeByEdge"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The document's class, put into `BACKENDS` as the document says."""
    monkeypatch.setitem(registry.BACKENDS, NAME, f"{__name__}:made")


@pytest.mark.parametrize("dtype", every.DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_gradients_and_bits(case, dtype):
    every.test_values_and_gradients(case, NAME, dtype, "cpu")
    every.test_integers_match_to_the_bit(case, NAME, dtype, "cpu")


@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "inverse"), ids=str)
def test_strides_and_an_input_gradient_onto_another(case):
    small = Case(**{**case.__dict__, "voxels": min(case.voxels, 40)})
    every.test_strides_and_repeats(small, NAME, "cpu")
    every.test_an_input_gradient_onto_another(small, NAME, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", every.TWICE, ids=str)
def test_gradients_of_gradients(case):
    every.test_gradients_of_gradients(case, NAME, "cpu")
