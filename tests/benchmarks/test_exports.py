"""The benchmarks of exported and of packaged networks: what they compare, and what they read."""

import numpy as np
import pytest
import torch

from benchmarks import cpp_package, exports
from benchmarks.clients.scenes import Setting
from sparseconv import nn


def test_a_network_is_compared_in_a_new_process(tmp_path, monkeypatch):
    cells = np.random.default_rng(0).integers(-12, 12, (300, 3))
    np.savez(tmp_path / "lidar_ouster_os2_010.npz", coords=cells)
    monkeypatch.setitem(exports.OURS, "tiny", lambda shape: nn.UNet(4, 3, channels=(8, 16)))
    row = exports.measure("tiny", Setting(tmp_path, tmp_path, "cpu", scans=3, reach=8))
    assert row["bits_equal"] is True, row
    assert (len(row["rows"]), row["rows"][-1], row["outputs"]) == (4, 0, 1)
    assert row["numbers"] == 3 * sum(row["rows"])


def test_one_bit_is_seen():
    x = torch.randn(4, 3)
    wanted = [x, torch.arange(3), 7]
    assert exports.compared([x.clone(), torch.arange(3), 7], wanted)
    other = x.clone()
    other.view(torch.int32)[2, 1] ^= 1
    for found in ([other, *wanted[1:]], [x, torch.arange(3).int(), 7], [x, torch.arange(3), 8], wanted[:2], [x[:3]]):
        assert not exports.compared(found, wanted)
    assert not exports.compared([-torch.zeros(2)], [torch.zeros(2)])


def test_what_the_program_in_cpp_says_is_read():
    said = """180 steps, 180 nodes in the graph
3700 voxels
network: 0.559 ms, the median of 500
result 0 [3700, 19]: off by 0 of 4.2
result 1 [3700, 4]: off by 0 of 99
equal to what was expected
"""
    found = cpp_package.read(said)
    assert found == {"voxels": 3700, "ms": 0.559, "calls": 500, "results": 2, "is_equal": True}
    assert cpp_package.read(said.replace("equal to what", "not what"))["is_equal"] is False
    for line in said.splitlines()[1:3] + said.splitlines()[-1:]:
        with pytest.raises(RuntimeError, match="said something else"):
            cpp_package.read(said.replace(line, ""))


def test_a_row_has_both_times_of_each_round(tmp_path, monkeypatch):
    class Example:
        @staticmethod
        def write(name, folder, *more):
            class Made:
                files, options, call = [tmp_path / "a.pt", tmp_path / "b.bin", tmp_path / "c.pt"], [], None

            return Made

        @staticmethod
        def median(call, repeat, card):
            return 2.0, [torch.zeros(2)]

    monkeypatch.setattr(cpp_package, "example", lambda: Example)
    times = iter((1.0, 3.0, 1.5))
    lines = "9 voxels\nnetwork: {} ms, the median of 5\nresult 0 [2]: off by 0 of 1\nequal to what was expected\n"
    monkeypatch.setattr(cpp_package, "said_by", lambda *command, codes: lines.format(next(times)))
    row = cpp_package.measure(tmp_path / "run_package", "unet", (24, 240), True, 3, 5)
    assert row["python_ms"] == [2.0] * 3
    assert row["cpp_ms"] == [1.0, 3.0, 1.5]
    assert (row["cpp_over_python"], row["bits_equal"], row["voxels"]) == (0.75, True, 9)
