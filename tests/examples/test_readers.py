"""Readers return what was written, bit by bit, in the formats that the data sets document."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

IGNORE = -100
TINY = {"beams": 6, "around": 60}


# ---- SemanticKITTI


def test_semantic_kitti_points_are_the_files_bits(tmp_path):
    import semantic_kitti
    from stand_ins import semantic_kitti as stand_in

    stand_in.write(tmp_path, train=3, valid=1, **TINY)
    rng = np.random.default_rng(0)
    places = [("00", 0), ("01", 0), ("00", 1), ("08", 0)]
    for sequence, number in places:
        written, label = stand_in.scan(rng, **TINY)
        assert written.dtype == np.float32
        assert label.dtype == np.uint32
        folder = tmp_path / "sequences" / sequence
        points, remission = semantic_kitti.read_points(folder / "velodyne" / f"{number:06d}.bin")
        assert np.array_equal(torch.cat([points, remission], 1).numpy(), written)
        classes = semantic_kitti.read_labels(folder / "labels" / f"{number:06d}.label").numpy()
        mapped = np.array([semantic_kitti.LEARNING_MAP[raw] for raw in (label & 0xFFFF).tolist()])
        assert np.array_equal(classes, np.where(mapped == 0, IGNORE, mapped - 1))
    assert len(semantic_kitti.SemanticKITTI(tmp_path, "train")) == 3
    assert len(semantic_kitti.SemanticKITTI(tmp_path, "valid")) == 1


def test_semantic_kitti_labels_as_the_benchmark_defines_them(tmp_path):
    import semantic_kitti as recipe

    raw = {
        252: "car",
        10: "car",
        60: "road",
        13: "other-vehicle",
        256: "other-vehicle",
        254: "person",
        81: "traffic-sign",
    }
    values = np.array([*raw, 0, 1, 52, 99], np.uint32)
    (values | (7 << 16)).astype("<u4").tofile(tmp_path / "a.label")  # an instance in the upper half
    found = recipe.read_labels(tmp_path / "a.label").tolist()
    assert found == [recipe.CLASSES.index(name) for name in raw.values()] + [IGNORE] * 4
    np.array([2], "<u4").tofile(tmp_path / "b.label")
    with pytest.raises(ValueError, match="not of SemanticKITTI"):
        recipe.read_labels(tmp_path / "b.label")
    assert len(recipe.CLASSES) == 19
    assert set(recipe.LEARNING_MAP) == set(recipe.CONTENT)
    assert sum(recipe.CONTENT.values()) == pytest.approx(1, abs=1e-5)
    share = {raw: recipe.CONTENT[raw] for raw in (10, 252)}
    assert recipe.class_weights()[0] == pytest.approx(1 / (sum(share.values()) + 1e-3), rel=1e-5)
    assert set(recipe.SPLITS["train"]) | set(recipe.SPLITS["valid"]) == set(range(11))


# ---- nuScenes


def test_nuscenes_key_frames_and_labels(tmp_path):
    import nuscenes_lidarseg as recipe
    from stand_ins import nuscenes as stand_in

    stand_in.write(tmp_path, train=3, valid=2, **TINY)
    rng = np.random.default_rng(0)
    written = [stand_in.scan(rng, **TINY) for _ in range(5)]
    train, valid = (recipe.NuScenes(tmp_path, split) for split in ("train", "valid"))
    assert (len(train), len(valid)) == (3, 2)  # and not the sweeps between key frames
    for data, (points, label), frame in zip([train] * 3 + [valid] * 2, written, train.frames + valid.frames):
        place, intensity = recipe.read_points(frame[0])
        assert np.array_equal(place.numpy(), points[:, :3])
        assert np.array_equal(intensity.numpy()[:, 0] * np.float32(255), points[:, 3])
        names = [recipe.CLASS_OF.get(stand_in.CATEGORIES[k]) for k in label]
        wanted = [IGNORE if name is None else recipe.CLASSES.index(name) for name in names]
        assert data.read_labels(frame[1]).tolist() == wanted


def test_nuscenes_takes_indices_from_its_table(tmp_path):
    import nuscenes_lidarseg as recipe
    from stand_ins import nuscenes as stand_in

    stand_in.write(tmp_path, train=1, valid=1, **TINY)
    table = tmp_path / recipe.VERSION / "category.json"
    rows = json.loads(table.read_text())
    for row in rows:
        row["index"] = 31 - row["index"]
    table.write_text(json.dumps(rows))
    np.array([31 - 17, 31], np.uint8).tofile(tmp_path / "a.bin")  # a car and noise under other numbers
    assert recipe.NuScenes(tmp_path, "train").read_labels(tmp_path / "a.bin").tolist() == [3, IGNORE]


def test_nuscenes_split_is_the_devkits():
    import nuscenes_lidarseg as recipe
    from stand_ins import nuscenes as stand_in

    assert len(recipe.HELD_OUT) == 150
    assert {"scene-0003", "scene-0103", "scene-0916", "scene-1073"} <= recipe.HELD_OUT
    assert not {"scene-0001", "scene-0061", "scene-0655", "scene-0918", "scene-1077"} & recipe.HELD_OUT
    assert len(recipe.CLASSES) == 16
    assert set(recipe.CLASS_OF.values()) == set(recipe.CLASSES)
    ignored = set(stand_in.CATEGORIES) - set(recipe.CLASS_OF)
    assert len(ignored) == 12
    assert {"animal", "vehicle.ego", "static.other", "noise", "human.pedestrian.stroller"} <= ignored


# ---- ScanNet


def test_scannet_vertices_and_labels(tmp_path):
    pytest.importorskip("plyfile")
    import scannet as recipe
    from stand_ins import scannet as stand_in

    points = np.array([[0.1, 0.2, 0.3], [1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]], "f4")
    colours = np.array([[0, 127, 255]] * 5, "u1")
    labels = np.array([1, 39, 0, 40, 14], "u2")  # wall, otherfurniture, unlabelled, otherprop, desk
    (tmp_path / "scans" / "scene0000_00").mkdir(parents=True)
    scene = tmp_path / "scans" / "scene0000_00" / "scene0000_00_vh_clean_2"
    stand_in.write_scene(scene, points, colours, labels, np.array([[0, 1, 2], [2, 3, 4]], "i4"))
    assert scene.with_name(f"{scene.name}.ply").read_bytes().startswith(b"ply\nformat binary_little_endian 1.0\n")
    place, colour = recipe.read_points(scene.with_name(f"{scene.name}.ply"))
    assert np.array_equal(place.numpy(), points)
    assert np.array_equal(((colour + 1) * 127.5).round().to(torch.uint8).numpy(), colours)
    names = [
        recipe.CLASSES[k] if k >= 0 else None for k in recipe.read_labels(scene.with_name(f"{scene.name}.labels.ply"))
    ]
    assert names == ["wall", "otherfurniture", None, None, "desk"]
    (tmp_path / "scannetv2_val.txt").write_text("scene0000_00\n")
    scan = recipe.ScanNet(tmp_path, "val", 0.5)[0]
    assert scan.point_labels.tolist() == [0, 19, IGNORE, IGNORE, 12]
    assert len(scan.coords) == 5


# ---- ModelNet40


def test_off_files_with_both_headers_and_with_polygons(tmp_path):
    import modelnet40 as recipe
    from stand_ins import modelnet40 as stand_in

    vertices, triangles = stand_in.joined(stand_in.SHAPES["chair"](np.random.default_rng(0)))
    for glued in (False, True):
        stand_in.write_off(tmp_path / "a.off", vertices, triangles, glued)
        assert (tmp_path / "a.off").read_text().startswith("OFF\n") != glued
        found = recipe.read_off(tmp_path / "a.off")
        assert np.array_equal(found[0].numpy(), vertices.astype(np.float32))
        assert np.array_equal(found[1].numpy(), triangles)
    (tmp_path / "b.off").write_text("OFF\n5 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n0 0 1\n4 0 1 2 3\n3 0 1 4\n")
    assert recipe.read_off(tmp_path / "b.off")[1].tolist() == [[0, 1, 2], [0, 2, 3], [0, 1, 4]]
    (tmp_path / "c.off").write_text("PLY")
    with pytest.raises(ValueError, match="does not start with OFF"):
        recipe.read_off(tmp_path / "c.off")


def test_points_are_drawn_evenly_over_the_surface():
    import modelnet40 as recipe

    torch.manual_seed(0)
    vertices = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 1, 0], [0, 0, 5], [1, 0, 5], [0, 1, 5]])
    points = recipe.sample(vertices, torch.tensor([[0, 1, 2], [3, 4, 5]]), 4000)
    low = points[:, 2] == 0
    assert (low | (points[:, 2] == 5)).all()
    assert float(low.float().mean()) == pytest.approx(0.75, abs=0.03)  # by area
    assert torch.allclose(points[low].mean(0), torch.tensor([1, 1 / 3, 0]), atol=0.05)  # the centroid
    assert (points[low, 0] / 3 + points[low, 1] <= 1 + 1e-6).all()


# ---- KITTI


def test_kitti_boxes_hold_their_points(tmp_path):
    import kitti_boxes as recipe
    from stand_ins import kitti as stand_in
    from stand_ins.street import KINDS, street

    seen = street(np.random.default_rng(1), 24, 600)
    (tmp_path / "labels.txt").write_text(stand_in.labels(seen))
    (tmp_path / "calib.txt").write_text(stand_in.calibration())
    camera, _ = recipe.read_calibration(tmp_path / "calib.txt")
    boxes = recipe.read_boxes(tmp_path / "labels.txt", camera)
    assert len(boxes) > 2
    names = {recipe.CLASSES.index(name): kind for kind, name in stand_in.NAMES.items()}
    for box in boxes:
        near = np.linalg.norm(seen.boxes[:, 1:4] - box[1:4].numpy(), axis=1)
        row = int(near.argmin())
        assert near[row] < 1e-3
        assert KINDS[int(seen.boxes[row, 0])] == names[int(box[0])]
        assert np.allclose(seen.boxes[row, 4:], box[4:], atol=1e-4)
        mine = seen.points[seen.instance == row + 1] - box[1:4].numpy()
        cos, sin = np.cos(float(box[7])), np.sin(float(box[7]))
        along = np.stack([mine @ [cos, sin, 0], mine @ [-sin, cos, 0], mine[:, 2]], 1)
        assert (np.abs(along) < box[4:7].numpy() / 2 + 0.1).all()


def test_kitti_keeps_what_the_camera_sees(tmp_path):
    import kitti_boxes as recipe
    from stand_ins import kitti as stand_in

    stand_in.write(tmp_path, train=1, val=1, beams=8, around=200)
    space = recipe.Space((0, -12.8, -3), (32, 12.8, 1), (0.2, 0.2, 0.1))
    coords, features, boxes = recipe.Kitti(tmp_path, "train", space)[0]
    assert recipe.Space().shape == (41, 1600, 1408)  # SECOND's
    assert (coords >= 0).all()
    assert (coords < torch.tensor(space.shape)).all()
    x, y = features[:, 0] * 20, features[:, 1] * 20
    assert (y.abs() < 0.9 * x + 1).all()  # some 80 degrees wide
    assert ((boxes[:, 0] == 0) | (boxes[:, 0] == 1)).all()


def test_average_precision_by_hand():
    import kitti_boxes as recipe

    boxes = [torch.tensor([[0, 5.0, 0, 0, 4, 2, 1.5, 0], [0, 15.0, 0, 0, 4, 2, 1.5, 0]])]
    right, wrong = [0, 5.3, 0, 0, 4, 2, 1.5, 0], [0, 25.0, 0, 0, 4, 2, 1.5, 0]
    found = torch.tensor([[*wrong, 0.9], [*right, 0.8], [*right, 0.7]])
    # precision 0, 1/2, 1/3 at recalls 0, 1/2, 1/2: half of the recalls have 1/2, the others none
    assert recipe.average_precision([found], boxes) == pytest.approx(0.25)
    assert recipe.average_precision([found[1:2]], [boxes[0][:1]]) == 1.0


# ---- rMD17, flow


def test_rmd17_frames(tmp_path):
    import molecules as recipe
    from stand_ins import rmd17 as stand_in

    stand_in.write(tmp_path, train=6, test=3)
    frames = np.load(tmp_path / "npz_data" / "rmd17_ethanol.npz")
    rows = {split: np.loadtxt(tmp_path / "splits" / f"index_{split}_01.csv", dtype=int) for split in ("train", "test")}
    assert sorted([*rows["train"], *rows["test"]]) == list(range(9))
    charges, data = recipe.read(tmp_path, "ethanol", "test")
    assert charges.tolist() == [6, 6, 8, 1, 1, 1, 1, 1, 1]
    for tensor, name in zip(data.tensors, ("coords", "energies", "forces")):
        assert np.array_equal(tensor.numpy(), frames[name][rows["test"]].astype(tensor.numpy().dtype))


def test_a_potential_turns_with_its_molecule(tmp_path):
    import molecules as recipe
    from stand_ins import rmd17 as stand_in

    torch.manual_seed(0)
    net = recipe.Potential(torch.from_numpy(stand_in.CHARGES.astype(np.int64)), channels=4).double()
    place = torch.from_numpy(stand_in.ETHANOL)[None] + 0.05 * torch.randn(2, 9, 3, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q  # rotations and mirrors
    energy, forces = (v.detach() for v in net.energy_and_forces(place))
    turned, pulled = (v.detach() for v in net.energy_and_forces(place @ turn.T))
    assert torch.allclose(turned, energy, rtol=1e-9)
    assert torch.allclose(pulled, forces @ turn.T, atol=1e-9 * float(forces.abs().max()) + 1e-12)
    assert forces.abs().max() > 1e-3


def test_flow_between_plates_is_a_parabola():
    from stand_ins.pore_flow import flow

    solid = np.zeros((1, 12, 4), bool)
    solid[:, [0, -1]] = True  # 10 cells wide, walls half way to the solid cells
    x, y = flow(solid, 1500, push=1e-4)[:, 0]
    across = np.arange(12) - 5.5
    wanted = 3 * 1e-4 * (25 - across**2)  # F (h^2 - y^2) / (2 viscosity), viscosity 1/6
    assert np.allclose(x[1:-1], wanted[1:-1, None], rtol=0.06)
    assert np.abs(y).max() < 1e-6
    assert (x[[0, -1]] == 0).all()


def test_pores_are_what_the_file_says(tmp_path):
    pytest.importorskip("scipy")
    import pore_flow as recipe
    from stand_ins import pore_flow as stand_in

    stand_in.write(tmp_path, train=1, test=1, size=16, steps=5)
    file = np.load(tmp_path / "test" / "001.npz")
    coords, features, velocity = recipe.Media(tmp_path, "test")[0]
    assert np.array_equal(coords.numpy(), np.argwhere(~file["solid"]))
    assert np.array_equal(velocity.numpy(), file["velocity"][:, ~file["solid"]].T)
    assert features[:, 1].min() == 0.25  # one cell from a wall
    torch.manual_seed(0)
    moved = recipe.Media(tmp_path, "test", augment=True)[0]
    assert torch.equal(moved[1].sort(0).values, features.sort(0).values)


# ---- shared pieces, the coder


def test_votes_and_scores():
    from scans import Confusion, to_voxels

    points = torch.tensor([[0.1, 0, 0], [0.2, 0, 0], [0.3, 0, 0], [5, 5, 5.0], [9, 9, 9.0]])
    labels = torch.tensor([2, 1, 2, IGNORE, 0])
    scan = to_voxels(points, points[:, :1], labels, 1.0, 3)
    assert scan.labels.tolist() == [2, IGNORE, 0]
    assert scan.features[:, 0].tolist() == pytest.approx([0.2, 5, 9])
    assert scan.point_rows.tolist() == [0, 0, 0, 1, 2]
    found = Confusion(4)
    found.add(torch.tensor([0, 0, 1, 1, IGNORE]), torch.tensor([0, 1, 1, 1, 2]))
    assert found.iou()[:2].tolist() == pytest.approx([1 / 2, 2 / 3])
    assert found.iou()[2:].isnan().all()  # the ignored point's class was never seen
    assert found.mean_iou() == pytest.approx(7 / 12)
    assert found.guessing() == pytest.approx(1 / 4)


def test_batches_lead_back_to_points():
    from scans import collate, to_voxels

    torch.manual_seed(0)
    scans = [to_voxels(torch.rand(50, 3), torch.rand(50, 2), torch.randint(3, (50,)), 0.4, 3) for _ in range(2)]
    batch = collate(scans)
    split = torch.split(batch.point_rows, 50)
    for item, (scan, rows) in enumerate(zip(scans, split)):
        assert torch.equal(batch.x.grid.coords[rows][:, 1:], scan.coords[scan.point_rows])
        assert (batch.x.grid.coords[rows][:, 0] == item).all()


@pytest.mark.parametrize("count", [1, 40])
def test_a_coder_reads_what_it_wrote(count):
    pytest.importorskip("constriction")
    import occupancy_coder as recipe

    torch.manual_seed(0)
    coords = (torch.randint(-20, 20, (count, 3), dtype=torch.int32)).unique(dim=0)
    tree = recipe.Octree(coords + 20, 6)
    for level, occupancy in enumerate(tree.occupancy):
        assert torch.equal(recipe.children_of(tree.nodes[level], occupancy), tree.nodes[level + 1])
    net = recipe.Predictor(4)
    data = recipe.encode(net, coords[torch.randperm(len(coords))])
    assert torch.equal(recipe.decode(net, data), coords)
