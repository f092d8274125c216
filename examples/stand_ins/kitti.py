"""A stand-in for KITTI's 3D objects: training/{velodyne,label_2,calib}, ImageSets/{train,val}.txt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stand_ins.street import KINDS, Street, street

CALIBRATION = {
    "P2": [[721.5377, 0, 609.5593, 44.85728], [0, 721.5377, 172.854, 0.2163791], [0, 0, 1, 0.002745884]],
    "R0_rect": [[0.9999239, 0.0098378, -0.0074450], [-0.0098698, 0.9999421, -0.0042785],
                [0.0074025, 0.0043516, 0.9999631]],
    "Tr_velo_to_cam": [[0.0075337, -0.9999714, -0.0006166, -0.0040698], [0.0148025, 0.0007281, -0.9998902, -0.0763162],
                       [0.9998621, 0.0075238, 0.0148076, -0.2717806]],
}  # fmt: skip
NAMES = {"car": "Car", "person": "Pedestrian"}


def write(folder: Path, train: int = 12, val: int = 4, seed: int = 0, beams: int = 24, around: int = 600) -> None:
    """Sweeps all around, as the real ones are; boxes only of what the camera sees."""
    rng = np.random.default_rng(seed)
    for kind in ("velodyne", "label_2", "calib"):
        (folder / "training" / kind).mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets").mkdir(exist_ok=True)
    for split, numbers in (("train", range(train)), ("val", range(train, train + val))):
        (folder / "ImageSets" / f"{split}.txt").write_text("".join(f"{number:06d}\n" for number in numbers))
        for number in numbers:
            seen = street(rng, beams, around)
            points = np.concatenate([seen.points, seen.remission[:, None]], 1).astype("<f4")
            points.tofile(folder / "training" / "velodyne" / f"{number:06d}.bin")
            (folder / "training" / "label_2" / f"{number:06d}.txt").write_text(labels(seen))
            (folder / "training" / "calib" / f"{number:06d}.txt").write_text(calibration())


def calibration() -> str:
    """A line a matrix, rows one after another."""
    rows = {name: np.ravel(values) for name, values in CALIBRATION.items()}
    rows = {
        "P0": rows["P2"],
        "P1": rows["P2"],
        "P2": rows["P2"],
        "P3": rows["P2"],
        **rows,
        "Tr_imu_to_velo": np.eye(3, 4).ravel(),
    }
    return "".join(f"{name}: {' '.join(f'{v:.12e}' for v in values)}\n" for name, values in rows.items())


def labels(seen: Street) -> str:
    """type truncated occluded alpha, image box, height width length, bottom center in the camera's axes, rotation_y."""
    turn, move = np.eye(4), np.eye(4)
    turn[:3, :3], move[:3] = CALIBRATION["R0_rect"], CALIBRATION["Tr_velo_to_cam"]
    lines = []
    for row, (kind, x, y, z, length, width, height, yaw) in enumerate(seen.boxes, 1):
        name = NAMES.get(KINDS[int(kind)])
        bottom = turn @ move @ [x, y, z - height / 2, 1]
        u, v, depth = np.array(CALIBRATION["P2"]) @ bottom
        if name is None or depth < 1 or not 0 < u / depth < 1242 or (seen.instance == row).sum() < 5:
            continue
        rotation = (-yaw - np.pi / 2 + np.pi) % (2 * np.pi) - np.pi
        place = " ".join(f"{v:.6f}" for v in (height, width, length, *bottom[:3], rotation))
        image = " ".join(f"{pixel / depth + side:.2f}" for side in (-9, 9) for pixel in (u, v))
        lines.append(f"{name} 0.00 0 0.00 {image} {place}\n")
    lines.append("DontCare -1 -1 -10 500.00 170.00 520.00 180.00 -1 -1 -1 -1000 -1000 -1000 -10\n")
    return "".join(lines)
