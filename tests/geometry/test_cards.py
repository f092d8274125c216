"""Which cards have kernels: stand-ins for cards that are not here, and what a user is told."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparseconv
from sparseconv.backends.base import Request
from sparseconv.backends.registry import backend
from sparseconv.backends.triton_implicit_gemm import backend as triton_backend
from sparseconv.gpu import cuda_capability as cards


@pytest.fixture
def card(monkeypatch):
    """A function that puts a card of this compute capability, or this version of HIP, in the machine."""
    forget()

    def put(capability=(9, 0), hip=None, architecture=""):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
        found = SimpleNamespace(gcnArchName=architecture + ":sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)

    yield put
    forget()


def forget():
    for asked in (cards.refusal, cards.has_kernels, cards.has_triton, cards.uses_ptx, cards._without_triton):
        asked.cache_clear()


DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_from_turing_on_are_served_by_ptx_from_ampere_on(card, capability):
    card(capability)
    assert cards.refusal(DEVICE) is None
    assert cards.uses_ptx(DEVICE) == (capability >= (8, 0))
    cards.check_kernels(DEVICE, "this")


@pytest.mark.parametrize("architecture", cards.AMD)
def test_amd_cards_that_kernels_are_compiled_for_are_served_without_ptx(card, architecture):
    card((9, 4), "7.0", architecture)
    assert cards.refusal(DEVICE) is None
    assert not cards.uses_ptx(DEVICE)
    assert cards.precision_of(torch.float16, DEVICE) == "ieee"


@pytest.mark.parametrize("capability", [(6, 1), (7, 0)])
def test_older_cards_have_no_kernels_and_the_reason_is_in_words(card, capability):
    card(capability)
    with pytest.raises(ValueError, match=rf"^this needs.*capability {capability[0]}\.{capability[1]}.*7\.5"):
        cards.check_kernels(DEVICE, "this")


def test_other_amd_cards_have_no_kernels_and_the_reason_is_in_words(card):
    card((10, 3), "6.3.1", "gfx1030")
    with pytest.raises(ValueError, match=r"compiled for gfx942, .* of AMD's GPUs, and this is gfx1030"):
        cards.check_kernels(DEVICE, "this")


def test_the_environment_keeps_the_kernels_away(card, monkeypatch):
    card()
    monkeypatch.setenv("SPARSECONV_KERNELS", "0")
    assert cards.refusal(DEVICE) == "SPARSECONV_KERNELS is 0 in the environment"
    assert cards.has_triton(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float32])
def test_before_ampere_triton_multiplies_fp32_alone(card, monkeypatch, dtype):
    card((7, 5))
    monkeypatch.setattr(triton_backend, "card_of", lambda device: (40, (7, 5)))
    request = Request(None, DEVICE, dtype, 16, 16, 1)
    said = backend("triton_implicit_gemm").unsupported(request)
    assert said is None if dtype == torch.float32 else re.match(rf"Triton multiplies {dtype} .* Ampere", said)


@pytest.mark.parametrize("triton", [None, "3.2.0"])
def test_without_triton_or_with_an_old_one_torch_serves_the_card(card, monkeypatch, triton):
    card()
    monkeypatch.setitem(sys.modules, "triton", triton and SimpleNamespace(__version__=triton))
    said = "Triton is not installed" if triton is None else r"Triton 3\.2\.0 is installed.*3\.6 or newer"
    assert not cards.has_kernels(DEVICE)
    assert not cards.has_triton(DEVICE)
    assert re.match(said, cards.refusal(DEVICE))


@pytest.mark.parametrize(("capability", "hip"), [((7, 0), None), ((9, 0), "6.3.1")])
def test_the_triton_backend_and_the_norms_say_the_same(card, capability, hip):
    from sparseconv.nn.fused import normalize

    card(capability, hip)
    request = Request(None, DEVICE, torch.float32, 4, 4, 1)
    assert backend("triton_implicit_gemm").unsupported(request) == cards.refusal(DEVICE)
    assert not normalize.has_kernels(DEVICE)


def test_a_card_is_asked_once(card, monkeypatch):
    card((8, 0))
    assert cards.has_kernels(DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail("asked again"))
    assert cards.has_kernels(DEVICE)


def test_all_that_holds_ptx_is_asked_about():
    """Kernels of geometry run for grids, which ask when they are made; the Triton backend asks for itself."""
    root = Path(sparseconv.__file__).parent
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "inline_asm" in path.read_text()}
    assert "backends/triton_implicit_gemm/kernels.py" in found
    assert all(name.startswith(("geometry/gpu/", "gpu/", "backends/triton_implicit_gemm/")) for name in found), found
    for name in found - {"backends/triton_implicit_gemm/kernels.py"}:  # chosen by its constant ASM_LOADS
        for function in ast.parse((root / name).read_text()).body:
            text = ast.unparse(function)
            assert "inline_asm" not in text or "has_ptx()" in text, function.name
    users = [path for path in root.rglob("*.py") if "sparseconv.gpu.warp_ptx" in path.read_text()]
    assert {path.relative_to(root).parts[0] for path in users} == {"geometry", "gpu"}
