"""The runner of other libraries' tests, on a suite of three tests."""

from __future__ import annotations

import ast
import json
import sys

import pytest

from benchmarks.suites import __main__ as command
from benchmarks.suites import reasons, scripts
from benchmarks.suites.stand_ins import SUITES

OWN = """
import torch, torchsparse
from torchsparse import nn as spnn

def test_a_layer_on_a_card():
    assert torch.cuda.is_available()
    layer = spnn.Conv3d(2, 3, 3).to("cuda:0")
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32).cuda()
    y = layer(torchsparse.SparseTensor(torch.ones(2, 2, device=torch.device("cuda")), coords))
    with torch.autocast("cuda"):
        assert y.F.shape == (2, 3) and layer.to(0) is layer and torch.zeros(1).to(0).shape == (1,)

def test_what_fails():
    assert torchsparse.no_such_name
"""


@pytest.mark.slow
def test_a_suite_is_counted(tmp_path, monkeypatch, capsys):
    (tmp_path / "torchsparse" / "tests").mkdir(parents=True)
    (tmp_path / "torchsparse" / "tests" / "test.py").write_text(OWN)
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"rows": [{"suite": "spconv", "passed": 4}, {"suite": "torchsparse"}]}))
    given = ["suites", "--checkouts", str(tmp_path), "--suite", "torchsparse", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", given)
    assert command.main() == 1  # a test fails without a reason
    kept = {row["suite"]: row for row in json.loads(record.read_text())["rows"]}
    assert kept["spconv"] == {"suite": "spconv", "passed": 4}
    assert kept["torchsparse"]["passed"] == kept["torchsparse"]["failed"] == 1
    assert kept["torchsparse"]["why"] == {"UNEXPLAINED": ["test.py::test_what_fails"]}


def test_reasons_are_found_in_names_and_errors():
    assert reasons.REASONS.keys() == SUITES.keys()
    assert reasons.reason("minkowski", "python/network_speed.py", "no name") == reasons.THEIRS
    assert reasons.reason("fvdb", "test_x", "AttributeError: ... has no attribute '_backend'") == reasons.INNER
    assert reasons.reason("minkowski", "python/pool.py", "AssertionError") == ""
    found = {"a": {"outcome": "passed"}, "b": {"outcome": "not collected", "said": "No such file"}}
    row = command.counted("spconv_triton", found)
    assert (row["collected"], row["files_not_collected"], row["why"]) == (1, 1, {reasons.DATA: ["b"]})


@pytest.mark.parametrize(
    ("code", "cut"),
    [
        ("c = [{'RES': 512, 'C': 8, 'ksize': (3, 3)}]", "c = [{'RES': 16, 'C': 8, 'ksize': (3, 3)}]"),
        ("RES = [1, 16, 32]", "RES = [1, 16]"),
        ("for i in range(110): pass", "for i in range(12):\n    pass"),
    ],
)
def test_sizes_of_scripts_are_cut(code, cut):
    assert ast.unparse(scripts._Cut().visit(ast.parse(code))) == cut
