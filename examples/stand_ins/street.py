"""A street of boxes as a turning LiDAR sees it; the stand-ins of SemanticKITTI, nuScenes and KITTI write it down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HEIGHT = 1.73  # of the sensor above the road [m]
KINDS = ["nothing", "road", "sidewalk", "terrain", "building", "car", "vegetation", "trunk", "pole", "person"]
REMISSION = np.array([0, 0.25, 0.35, 0.15, 0.45, 0.6, 0.3, 0.2, 0.8, 0.5], np.float32)


@dataclass
class Street:
    points: np.ndarray  # (M, 3) float32, x ahead, y left, z up, the sensor at the origin [m]
    remission: np.ndarray  # (M,) float32, 0 to 1
    kind: np.ndarray  # (M,) row of KINDS
    ring: np.ndarray  # (M,) beam
    instance: np.ndarray  # (M,) 0 for what is not a thing, else 1 + row of boxes
    boxes: np.ndarray  # (B, 8): kind, center x y z, length, width, height, yaw


def street(rng: np.random.Generator, beams: int = 24, around: int = 480, reach: float = 36.0) -> Street:
    """One sweep over a street along x, with cars, people, trees, poles and houses at its sides."""
    boxes = _boxes(rng)
    up = np.deg2rad(np.linspace(-24, 4, beams))
    angle = np.linspace(-np.pi, np.pi, around, endpoint=False)
    ring, _ = (v.ravel() for v in np.meshgrid(np.arange(beams), angle, indexing="ij"))
    up, angle = (v.ravel() for v in np.meshgrid(up, angle, indexing="ij"))
    ray = np.stack([np.cos(up) * np.cos(angle), np.cos(up) * np.sin(angle), np.sin(up)], 1)
    distance = np.where(ray[:, 2] < -1e-3, -HEIGHT / np.minimum(ray[:, 2], -1e-3), np.inf)
    instance = np.zeros(len(ray), np.int64)
    for row, box in enumerate(boxes, 1):
        hit = _enter(ray, box)
        instance[hit < distance] = row
        distance = np.minimum(distance, hit)
    seen = distance < reach
    ray, distance, instance, ring = ray[seen], distance[seen], instance[seen], ring[seen]
    points = ray * (distance + rng.normal(0, 0.015, len(distance)))[:, None]
    aside = np.abs(points[:, 1])
    ground = np.where(
        aside < 5, KINDS.index("road"), np.where(aside < 8, KINDS.index("sidewalk"), KINDS.index("terrain"))
    )
    kind = np.where(instance > 0, np.concatenate([[0], boxes[:, 0]]).astype(int)[instance], ground)
    leaves = kind == KINDS.index("vegetation")
    points[leaves] += rng.normal(0, 0.2, (leaves.sum(), 3))
    remission = np.clip(REMISSION[kind] + rng.normal(0, 0.08, len(kind)), 0, 1)
    return Street(points.astype(np.float32), remission.astype(np.float32), kind, ring, instance, boxes)


def _boxes(rng: np.random.Generator) -> np.ndarray:
    """(B, 8) without overlaps on the road: one slot along x for each car."""
    found = []

    def put(kind: str, x: float, y: float, size: tuple[float, float, float], yaw: float = 0.0, lift: float = 0.0):
        found.append([KINDS.index(kind), x, y, -HEIGHT + lift + size[2] / 2, *size, yaw])

    for x in np.arange(-27, 28, 9.0):
        for side in (-1, 1):
            if rng.random() < 0.6 and (abs(x) > 4 or side > 0):
                size = rng.normal([4.2, 1.75, 1.5], [0.3, 0.1, 0.1])
                put("car", x + rng.uniform(-2, 2), side * rng.uniform(2.6, 3.8), tuple(size), rng.normal(0, 0.15))
        for side in (-1, 1):
            spot = x + rng.uniform(-3, 3)
            if rng.random() < 0.5:
                put("person", spot, side * rng.uniform(5.5, 7.5), (0.5, 0.5, rng.uniform(1.6, 1.9)))
            if rng.random() < 0.5:
                put("pole", spot + 2, side * 7.8, (0.2, 0.2, 6.0))
            if rng.random() < 0.5:
                y = side * rng.uniform(9, 10)
                put("trunk", spot - 2, y, (0.4, 0.4, 2.4))
                put("vegetation", spot - 2, y, (3.0, 3.0, 2.5), rng.uniform(0, 1), lift=2.4)
            if rng.random() < 0.7:
                put("building", x, side * rng.uniform(15, 18), (9.0, 6.0, rng.uniform(4, 9)))
    return np.array(found)


def _enter(ray: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Where each ray (M, 3) from the origin enters a box [m]; infinite where it does not."""
    _, x, y, z, *size, yaw = box
    cos, sin = np.cos(yaw), np.sin(yaw)
    into = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    start, ray = -into @ [x, y, z], ray @ into.T
    ray = np.where(np.abs(ray) < 1e-9, 1e-9, ray)
    near, far = (-np.array(size) / 2 - start) / ray, (np.array(size) / 2 - start) / ray
    enter, leave = np.minimum(near, far).max(1), np.maximum(near, far).min(1)
    return np.where((enter < leave) & (enter > 0), enter, np.inf)
