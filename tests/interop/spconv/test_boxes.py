"""Overlaps of boxes and non-maximum suppression, by spconv's names; its wheel judges overlaps where it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseconv.interop.spconv import boxes, utils


def rectangles(count: int, seed: int) -> np.ndarray:
    """Rotated rectangles (N, 4, 2) around the origin, corners with the clock, as spconv wants them."""
    rng = np.random.default_rng(seed)
    size, angle = rng.uniform(1, 4, (count, 1, 2)), rng.uniform(0, 2 * np.pi, count)
    corners = size / 2 * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], 1).reshape(-1, 2, 2)
    return corners @ turn.mT + rng.uniform(-2, 2, (count, 1, 2))


def sampled(a: np.ndarray, b: np.ndarray) -> float:
    """The share of a fine lattice's points that lie in both of those that lie in one, the slow way."""
    line = np.linspace(-5, 5, 801)
    points = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)

    def within(box: np.ndarray) -> np.ndarray:
        along = np.roll(box, -1, 0) - box
        sides = [e[0] * (points[:, 1] - c[1]) - e[1] * (points[:, 0] - c[0]) for c, e in zip(box, along)]
        return (np.array(sides) <= 0).all(0)

    first, second = within(a), within(b)
    return (first & second).sum() / (first | second).sum()


def test_overlaps_of_rotated_boxes():
    a, b = rectangles(6, 0), rectangles(5, 1)
    wanted = [[sampled(one, other) for other in b] for one in a]
    got = boxes.rbbox_iou(a, b, np.ones((6, 5)), 0.0)
    np.testing.assert_allclose(got, wanted, atol=5e-3)
    np.testing.assert_allclose(boxes.rbbox_iou(a[:, ::-1], b, np.ones((6, 5)), 0.0), got, atol=1e-12)
    far = boxes.rbbox_iou(a + 1e6, b + 1e6, np.ones((6, 5)), 0.0)
    np.testing.assert_allclose(far, got, atol=1e-8)
    shared = boxes.rbbox_intersection(a, a, np.ones((6, 6)), 0.0)
    sides = np.linalg.norm(np.diff(a, axis=1), axis=2)
    np.testing.assert_allclose(shared.diagonal(), sides[:, 0] * sides[:, 1], rtol=1e-12)
    gate = np.zeros((6, 5))
    gate[2, 3] = 0.5
    assert np.nonzero(boxes.rbbox_iou(a, b, gate, 0.4))[0].tolist() == [2][: int(got[2, 3] > 0)]
    assert boxes.rbbox_iou(a.astype(np.float32), b, np.ones((6, 5)), 0.0).dtype == np.float32


def test_spconv_finds_the_same_overlaps():
    pytest.importorskip("spconv.core_cc", reason="spconv's wheel is not installed")
    from spconv import utils as theirs

    a, b = rectangles(40, 2), rectangles(30, 3)
    for name in ("rbbox_iou", "rbbox_intersection"):
        wanted = getattr(theirs, name)(a, b, np.ones((40, 30)), 0.0)
        np.testing.assert_allclose(getattr(utils, name)(a, b, np.ones((40, 30)), 0.0), wanted, atol=1e-6)  # of fp32


def test_suppression_takes_out_what_overlaps_a_better_box():
    upright = np.array([[0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 2, 2], [0.1, 0, 2, 2], [5, 5, 6, 6]], np.float64)
    corners = upright[:, [0, 1, 0, 3, 2, 3, 2, 1]].reshape(-1, 4, 2)
    near = np.ones((5, 5))
    for thresh, kept in ((0.1, [0, 4]), (0.5, [0, 1, 4]), (0.96, [0, 1, 3, 4])):
        assert utils.non_max_suppression_cpu(upright, np.arange(5), thresh) == kept
        assert utils.rotate_non_max_suppression_cpu(corners, np.arange(5), near, thresh) == kept
    backwards = np.arange(5, dtype=np.int32)[::-1]
    assert utils.non_max_suppression_cpu(upright, backwards, 0.5) == [4, 3, 1]
    assert utils.rotate_non_max_suppression_cpu(corners, backwards, near, 0.5) == [4, 3, 1]
    assert utils.rotate_non_max_suppression_cpu(corners, np.arange(5), 0 * near, 0.1) == [0, 1, 2, 3, 4]
    touching = np.array([[0, 0, 1, 1], [2, 0, 3, 1]], np.float64)
    assert utils.non_max_suppression_cpu(touching, np.arange(2), 0.0001) == [0, 1]
    pixels = np.array([[0, 0, 1, 1], [1, 0, 2, 1]], np.float64)
    assert utils.non_max_suppression_cpu(pixels, np.arange(2), 0.3, 1.0) == [0]
    assert utils.non_max_suppression_cpu(upright[:0], np.arange(0), 0.5) == []


def test_wrong_boxes_are_told():
    good = rectangles(3, 0)
    with pytest.raises(TypeError, match=r"box_corners must be a numpy array \(N, 4, 2\)"):
        boxes.rbbox_iou(torch.from_numpy(good), good, np.ones((3, 3)), 0.0)
    with pytest.raises(ValueError, match=r"standup_iou must be \(3, 3\); got \(3, 2\)"):
        boxes.rbbox_iou(good, good, np.ones((3, 2)), 0.0)
    with pytest.raises(ValueError, match=r"order names box 7, and there are 3"):
        boxes.non_max_suppression_cpu(np.zeros((3, 4)), np.array([0, 7]), 0.5)
    with pytest.raises(TypeError, match=r"boxes must be a numpy array \(N, 4\)"):
        boxes.non_max_suppression_cpu(np.zeros((3, 3)), np.arange(3), 0.5)
