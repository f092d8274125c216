"""Boxes in the plane, upright and rotated, for numpy: overlaps and non-maximum suppression."""

from __future__ import annotations

import numpy as np

from sparseconv.checks import described
from sparseconv.interop.arguments import integers

#: pairs of boxes whose corners are cut at once
CHUNK = 4096


def rbbox_iou(
    box_corners: np.ndarray, qbox_corners: np.ndarray, standup_iou: np.ndarray, standup_thresh: float
) -> np.ndarray:
    """Intersection over union of rotated boxes, (N, K).

    Args:
        box_corners, qbox_corners: (N, 4, 2) and (K, 4, 2), corners one after another, in either sense.
        standup_iou: (N, K), overlaps of the upright boxes around them.
        standup_thresh: pairs whose ``standup_iou`` is no more have 0.

    >>> square = np.array([[[0.0, 0], [0, 2], [2, 2], [2, 0]]])
    >>> rbbox_iou(square, square + 1, np.ones((1, 1)), 0.0).round(4).tolist()
    [[0.1429]]
    """
    return _overlaps(box_corners, qbox_corners, standup_iou, standup_thresh, over_union=True)


def rbbox_intersection(
    box_corners: np.ndarray, qbox_corners: np.ndarray, standup_iou: np.ndarray, standup_thresh: float
) -> np.ndarray:
    """Areas in which rotated boxes overlap, (N, K); arguments as of `rbbox_iou`."""
    return _overlaps(box_corners, qbox_corners, standup_iou, standup_thresh, over_union=False)


def non_max_suppression_cpu(boxes: np.ndarray, order: np.ndarray, thresh: float, eps: float = 0.0) -> list[int]:
    """The boxes that stay: each in turn takes out the later ones that overlap it by ``thresh`` or more.

    Args:
        boxes: (N, 4) or more columns: x1, y1, x2, y2.
        order: (N,) integers, the best box first.
        eps: added to edges; 1 where corners are pixels.

    >>> boxes = np.array([[0.0, 0, 2, 2], [0.1, 0, 2, 2], [5, 5, 6, 6]])
    >>> non_max_suppression_cpu(boxes, np.arange(3), 0.5)
    [0, 2]
    """
    if not isinstance(boxes, np.ndarray) or boxes.ndim != 2 or boxes.shape[1] < 4:
        raise TypeError(f"boxes must be a numpy array (N, 4), but it is {described(boxes)}")
    low, high = boxes[:, :2], boxes[:, 2:4]
    areas = (high - low + eps).prod(1)

    def overlap(box: int, others: np.ndarray) -> np.ndarray:
        edges = np.minimum(high[box], high[others]) - np.maximum(low[box], low[others]) + eps
        shared = np.where((edges > 0).all(1), edges.prod(1), 0)
        return _ratio(shared, areas[box] + areas[others] - shared)

    return _kept(len(boxes), order, thresh, overlap)


def rotate_non_max_suppression_cpu(
    boxes: np.ndarray, order: np.ndarray, standup_iou: np.ndarray, thresh: float
) -> list[int]:
    """`non_max_suppression_cpu` of rotated boxes (N, 4, 2); pairs whose ``standup_iou`` (N, N) is 0 do not overlap."""
    corners = _corners("boxes", boxes)
    if np.shape(standup_iou) != (len(corners),) * 2:
        raise ValueError(f"standup_iou must be {(len(corners),) * 2}; got {np.shape(standup_iou)}")

    def overlap(box: int, others: np.ndarray) -> np.ndarray:
        near = standup_iou[box, others] > 0
        found = np.zeros(len(others), corners.dtype)
        found[near] = _paired(corners[np.full(near.sum(), box)], corners[others[near]], over_union=True)
        return found

    return _kept(len(corners), order, thresh, overlap)


def _kept(count: int, order: np.ndarray, thresh: float, overlap) -> list[int]:  # type: ignore[no-untyped-def]
    left = np.array(integers(np.asarray(order).tolist(), "order", 0), np.int64)
    if len(left) and left.max() >= count:
        raise ValueError(f"order names box {left.max()}, and there are {count}")
    kept = []
    while len(left):
        kept.append(int(left[0]))
        left = left[1:][overlap(left[0], left[1:]) < thresh]
    return kept


def _corners(name: str, given: np.ndarray) -> np.ndarray:
    if not isinstance(given, np.ndarray) or given.ndim != 3 or given.shape[1:] != (4, 2):
        raise TypeError(f"{name} must be a numpy array (N, 4, 2), but it is {described(given)}")
    return given


def _overlaps(
    given: np.ndarray, other: np.ndarray, standup_iou: np.ndarray, standup_thresh: float, over_union: bool
) -> np.ndarray:
    boxes, others = _corners("box_corners", given), _corners("qbox_corners", other)
    shape = (len(boxes), len(others))
    if np.shape(standup_iou) != shape:
        raise ValueError(f"standup_iou must be {shape}; got {np.shape(standup_iou)}")
    found = np.zeros(shape, boxes.dtype)
    first, second = np.nonzero(standup_iou > standup_thresh)
    for begin in range(0, len(first), CHUNK):
        at = first[begin : begin + CHUNK], second[begin : begin + CHUNK]
        found[at] = _paired(boxes[at[0]], others[at[1]], over_union)
    return found


def _paired(boxes: np.ndarray, others: np.ndarray, over_union: bool) -> np.ndarray:
    """The overlap of each of (M, 4, 2) with the other in its row, (M,) fp64."""
    centre = boxes[:, :1].astype(np.float64)  # far from the origin, areas would lose digits
    ours, theirs = (_one_sense(corners - centre) for corners in (boxes, others))
    shared = _area(_cut(ours, theirs)).clip(min=0)
    return _ratio(shared, _area(ours) + _area(theirs) - shared) if over_union else shared


def _ratio(shared: np.ndarray, union: np.ndarray) -> np.ndarray:
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0)


def _area(corners: np.ndarray) -> np.ndarray:
    """The signed area of polygons (M, V, 2), (M,): positive where corners go against the clock."""
    x, y = corners[..., 0], corners[..., 1]
    return ((x * np.roll(y, -1, 1)) - (np.roll(x, -1, 1) * y)).sum(1) / 2


def _one_sense(corners: np.ndarray) -> np.ndarray:
    return np.where((_area(corners) < 0)[:, None, None], corners[:, ::-1], corners)


def _cut(corners: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Polygons (M, V, 2) within boxes (M, 4, 2), by the method of Sutherland and Hodgman.

    Each edge of a box gives each edge of a polygon two ends. An edge that lies outside leaves its projection onto the
    box's edge: corners on one line enclose no area, so that all polygons keep as many corners.
    """
    for edge in range(4):
        start, along = box[:, None, edge], box[:, None, (edge + 1) % 4] - box[:, None, edge]
        begin, end = corners, np.roll(corners, -1, 1)
        of_begin, of_end = (_cross(along, points - start) for points in (begin, end))
        apart = of_begin - of_end
        share = np.where(apart != 0, of_begin / np.where(apart != 0, apart, 1), 0)[..., None]
        crossing = begin + share * (end - begin)
        squared = (along**2).sum(-1)
        fraction = ((end - start) * along).sum(-1) / np.where(squared > 0, squared, 1)
        projected = start + fraction[..., None] * along
        inside, stays = (of_begin >= 0)[..., None], (of_end >= 0)[..., None]
        first = np.where(inside == stays, np.where(stays, end, projected), crossing)
        second = np.where(stays, end, np.where(inside, crossing, projected))
        corners = np.stack([first, second], 2).reshape(len(corners), 2 * corners.shape[1], 2)
    return corners


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
