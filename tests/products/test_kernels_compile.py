"""The kernels of the products compile for the cards they may meet; in a process apart from the interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.test_triton_ahead_of_time import PLAIN
from tests.forked import printed
from tests.products.cases import PRODUCT_NAMES

EVERY = [pytest.param(str(arch), PRODUCT_NAMES, marks=pytest.mark.slow) for arch in (*PLAIN, 80, 86, 89, 90, 100, 120)]


@pytest.mark.parametrize(("arch", "words"), [("90", ["mul", "bf16"]), *EVERY])
def test_kernels_compile(arch, words, tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    said = printed("-m", "tests.products.compile_ahead", *words, arch, folder=root, env=environment)
    assert int(said.split()[0]) >= 5
    assert said.strip().endswith(f"for {arch}")
