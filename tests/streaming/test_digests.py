"""What tells tensors apart: their bytes, and sums of them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from sparseconv.streaming import digests


def _by_hand(data: bytes) -> list[int]:
    """`digests.sums` in Python's whole numbers."""
    data += bytes(-len(data) % 4)
    totals = [0, 0]
    for place in range(len(data) // 4):
        word = int.from_bytes(data[4 * place : 4 * place + 4], "little", signed=True)
        for at in range(2):
            weight = 2 * place + at
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, None):
                signed = weight - 2**64 if weight >> 63 else weight
                weight = (signed ^ (signed >> 33)) % 2**64
                weight = weight * factor % 2**64 if factor else weight | 1
            totals[at] += word * weight
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8])
def test_the_sums_of_a_tensor_are_those_of_its_bytes(monkeypatch, size, dtype):
    monkeypatch.setattr(digests, "PIECE", 5)
    whole = torch.randn(2 * size + 1, generator=torch.Generator().manual_seed(size)).mul(30).to(dtype)
    for values in (whole[:size], whole[1 : size + 1], whole[: 2 * size : 2]):  # also off their word, and apart
        want = _by_hand(b"".join(value.view(1).clone().view(torch.uint8).numpy().tobytes() for value in values))
        assert digests.sums(values).tolist() == want


def test_the_sums_of_a_tensor_change_with_each_of_its_bits_and_places(monkeypatch):
    monkeypatch.setattr(digests, "PIECE", 7)
    values = torch.randint(-128, 128, (40,), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    found = {tuple(digests.sums(values).tolist())}
    for at in range(40):
        for bit in range(8):
            other = values.view(torch.uint8).clone()
            other[at] ^= 1 << bit
            found.add(tuple(digests.sums(other).tolist()))
    found |= {tuple(digests.sums(values.roll(shift)).tolist()) for shift in range(1, 40)}
    assert len(found) == 1 + 320 + 39


def test_one_number_of_a_strided_tensor_has_bytes_too():
    values = torch.arange(2.0)[::2]
    assert digests.digest("x", values) == hashlib.sha256(b"x" + bytes(4)).hexdigest()
    assert digests.bytes_of(torch.empty(0)[::2]).tolist() == []


@pytest.mark.gpu
def test_a_large_tensor_on_a_card_is_told_apart_by_its_sums():
    values = torch.randn(digests.SUMMED, device="cuda").half()
    other = values.clone()
    assert digests.digest(values) == digests.digest(other) == digests.digest(digests.sums(values.cpu()))
    other[-1] += 1
    assert digests.digest(values) != digests.digest(other)
