"""A stand-in for nuScenes-lidarseg: v1.0-trainval/*.json, samples/LIDAR_TOP/*.pcd.bin, lidarseg/v1.0-trainval/*.bin."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stand_ins.street import KINDS, street

VERSION = "v1.0-trainval"
#: all 32 categories of nuScenes-lidarseg, in the order of their indices
CATEGORIES = [
    "noise", "animal", "human.pedestrian.adult", "human.pedestrian.child", "human.pedestrian.construction_worker",
    "human.pedestrian.personal_mobility", "human.pedestrian.police_officer", "human.pedestrian.stroller",
    "human.pedestrian.wheelchair", "movable_object.barrier", "movable_object.debris",
    "movable_object.pushable_pullable", "movable_object.trafficcone", "static_object.bicycle_rack", "vehicle.bicycle",
    "vehicle.bus.bendy", "vehicle.bus.rigid", "vehicle.car", "vehicle.construction", "vehicle.emergency.ambulance",
    "vehicle.emergency.police", "vehicle.motorcycle", "vehicle.trailer", "vehicle.truck", "flat.driveable_surface",
    "flat.other", "flat.sidewalk", "flat.terrain", "static.manmade", "static.other", "static.vegetation", "vehicle.ego",
]  # fmt: skip
NAMES = ["noise", "flat.driveable_surface", "flat.sidewalk", "flat.terrain", "static.manmade", "vehicle.car",
         "static.vegetation", "static.vegetation", "static.manmade", "human.pedestrian.adult"]  # fmt: skip


def write(folder: Path, train: int = 8, valid: int = 2, seed: int = 0, **sweep: int) -> None:
    """``train`` key frames in scene-0001 and -0002, ``valid`` in scene-0003; beside each a sweep without labels."""
    rng = np.random.default_rng(seed)
    tables: dict[str, list[dict]] = {name: [] for name in ("scene", "sample", "sample_data", "lidarseg")}
    for name in ("scene-0001", "scene-0002", "scene-0003"):
        tables["scene"].append({"token": f"token-{name}", "name": name})
    for number in range(train + valid):
        name = "scene-0003" if number >= train else f"scene-{1 + number % 2:04d}"
        token = f"{number:032x}"
        tables["sample"].append({"token": f"sample-{token}", "scene_token": f"token-{name}"})
        points, label = scan(rng, **sweep)
        for key_frame, kind in ((True, "samples"), (False, "sweeps")):
            file = f"{kind}/LIDAR_TOP/{number:06d}__LIDAR_TOP__{number}.pcd.bin"
            row = {"sample_token": f"sample-{token}", "filename": file, "is_key_frame": key_frame}
            tables["sample_data"].append({"token": token if key_frame else f"sweep-{token}", **row})
            _write(folder / file, points)
        file = f"lidarseg/{VERSION}/{token}_lidarseg.bin"
        tables["lidarseg"].append({"token": token, "sample_data_token": token, "filename": file})
        _write(folder / file, label)
    tables["category"] = [{"token": f"c{i}", "name": name, "index": i} for i, name in enumerate(CATEGORIES)]
    (folder / VERSION).mkdir()
    for name, rows in tables.items():
        (folder / VERSION / f"{name}.json").write_text(json.dumps(rows))


def scan(rng: np.random.Generator, **sweep: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (M, 5) float32: x right, y ahead, z up, intensity 0 to 255, ring; categories (M,) uint8."""
    seen = street(rng, **sweep)
    place = np.stack([-seen.points[:, 1], seen.points[:, 0], seen.points[:, 2]], 1)
    intensity = np.round(seen.remission * 255)
    points = np.concatenate([place, intensity[:, None], seen.ring[:, None]], 1).astype("<f4")
    label = np.array([CATEGORIES.index(name) for name in NAMES], np.uint8)[seen.kind]
    label[rng.random(len(label)) < 0.01] = CATEGORIES.index("noise")
    assert len(NAMES) == len(KINDS)
    return points, label


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values.tofile(path)
