"""Which cards are served: stand-ins for cards that are not here, and what a user is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparseconv
from sparseconv.backends.base import Request, backend
from sparseconv.geometry import cuda_capability as cards
from sparseconv.geometry import grid


@pytest.fixture
def card(monkeypatch):
    """A function that puts a card of this compute capability, or this version of HIP, in the machine."""
    cards.refusal.cache_clear()

    def put(capability=(9, 0), hip=None):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")

    yield put
    cards.refusal.cache_clear()


DEVICE = torch.device("cuda", 0)


class Coords:
    """Coordinates that say that they are on a GPU; nothing else may be asked of them."""

    is_cuda, device = True, DEVICE


def grid_on_a_card():
    made = object.__new__(grid.VoxelGrid)
    made.coords = Coords()
    return made


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_from_ampere_on_are_served(card, capability):
    card(capability)
    assert cards.refusal(DEVICE) is None
    cards.check_card(DEVICE)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_older_cards_are_refused_in_words(card, capability):
    card(capability)
    with pytest.raises(ValueError, match=rf"a card has compute capability {capability[0]}\.{capability[1]}.*8\.0.*CPU"):
        grid_on_a_card()._table_on_gpu(Coords())


def test_amd_cards_are_refused_in_words(card):
    card((9, 4), hip="6.3.1")
    with pytest.raises(ValueError, match=r"AMD cards \(HIP 6\.3\.1\).*drops without an error.*CPU"):
        grid_on_a_card()._table_on_gpu(Coords())


@pytest.mark.parametrize(("capability", "hip"), [((7, 5), None), ((9, 4), "6.3.1")])
def test_the_triton_backend_and_the_norms_say_the_same(card, capability, hip):
    from sparseconv.nn.fused import normalize

    card(capability, hip)
    request = Request(None, DEVICE, torch.float32, 4, 4, 1)
    assert backend("triton_implicit_gemm").unsupported(request) == cards.refusal(DEVICE)
    normalize.has_kernels.cache_clear()
    assert not normalize.has_kernels(DEVICE)
    normalize.has_kernels.cache_clear()


def test_a_card_is_asked_once(card, monkeypatch):
    card((8, 0))
    cards.check_card(DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail("asked again"))
    cards.check_card(DEVICE)


def test_all_that_holds_ptx_is_asked_about():
    """Kernels of geometry run for grids, which ask when they are made; the Triton backend asks for itself."""
    root = Path(sparseconv.__file__).parent
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "inline_asm" in path.read_text()}
    assert "backends/triton_implicit_gemm/kernels.py" in found
    assert all(name.startswith(("geometry/gpu/", "gpu/", "backends/triton_implicit_gemm/")) for name in found), found
    users = [path for path in root.rglob("*.py") if "sparseconv.gpu.warp_ptx" in path.read_text()]
    assert {path.relative_to(root).parts[0] for path in users} == {"geometry", "gpu"}
