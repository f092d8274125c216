"""Readers of clouds: round trips through files written here, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sparseconv.demo.clouds import READERS, default_voxel_size, read_cloud

POINTS = np.random.default_rng(0).uniform(-50, 50, (200, 3)).round(3)


def write(path, points):
    """Write points (M, 3) in the format of the path's ending, with that format's own package."""
    if path.suffix == ".npy":
        np.save(path, points)
    elif path.suffix == ".npz":
        np.savez(path, intensity=np.ones(len(points)), xyz=points)
    elif path.suffix == ".ply":
        plyfile = pytest.importorskip("plyfile")
        rows = np.array([tuple(p) for p in points], dtype=[("x", "f8"), ("y", "f8"), ("z", "f8")])
        plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")]).write(str(path))
    elif path.suffix == ".pcd":
        pypcd4 = pytest.importorskip("pypcd4")
        pypcd4.PointCloud.from_xyz_points(points.astype(np.float32)).save(str(path))
    else:
        laspy = pytest.importorskip("laspy")
        if path.suffix == ".laz" and not laspy.LazBackend.detect_available():
            pytest.skip("no decompressor for .laz")
        header = laspy.LasHeader(point_format=3, version="1.4")
        header.scales, header.offsets = np.full(3, 0.001), np.zeros(3)
        cloud = laspy.LasData(header)
        cloud.x, cloud.y, cloud.z = points.T
        cloud.write(str(path))


@pytest.mark.parametrize("ending", READERS)
def test_what_is_written_is_read(tmp_path, ending):
    path = tmp_path / f"cloud{ending}"
    write(path, POINTS)
    points = read_cloud(path)
    assert points.dtype == torch.float64
    # .pcd was written in 32 bits, .las in millimetres; the others keep every bit
    np.testing.assert_allclose(
        points.numpy(), POINTS, rtol=0, atol={".pcd": 5e-6, ".las": 1e-9, ".laz": 1e-9}.get(ending, 0)
    )


def test_far_coordinates_keep_their_millimetres(tmp_path):
    far = POINTS + [650_000.0, 6_860_000.0, 0.0]
    np.save(tmp_path / "far.npy", far)
    np.testing.assert_array_equal(read_cloud(tmp_path / "far.npy").numpy(), far)


def test_more_columns_and_whole_numbers_are_taken(tmp_path):
    np.save(tmp_path / "wide.npy", np.arange(20).reshape(4, 5))
    assert read_cloud(tmp_path / "wide.npy").tolist() == [[0, 1, 2], [5, 6, 7], [10, 11, 12], [15, 16, 17]]


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((0, 3)), "holds no points"),
        (np.zeros((5, 2)), r"shape \(5, 2\), not \(M, 3\): one row a point"),
        (np.zeros((3, 500)).T.copy().T[:, :2], r"shape \(3, 2\), not \(M, 3\): transpose it"),
        (np.zeros(7), r"shape \(7,\)"),
        (np.array([[0, 0, 0], [np.nan, 0, 0], [0, np.inf, 0]]), "2 of the 3 points .* are NaN or infinite: drop them"),
        (np.array([["a", "b", "c"]]), "positions are numbers"),
        (np.array([[None, 1, 2]]), "could not be read"),
    ],
)
def test_arrays_that_are_no_cloud(tmp_path, array, sentence):
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(ValueError, match=sentence):
        read_cloud(tmp_path / "bad.npy")


def test_archive_without_positions(tmp_path):
    np.savez(tmp_path / "two.npz", a=POINTS, b=POINTS)
    with pytest.raises(ValueError, match="it holds a, b; call the positions points"):
        read_cloud(tmp_path / "two.npz")
    np.savez(tmp_path / "one.npz", a=POINTS)
    assert len(read_cloud(tmp_path / "one.npz")) == len(POINTS)


def test_ply_without_vertices(tmp_path):
    plyfile = pytest.importorskip("plyfile")
    rows = np.array([(1.0,)], dtype=[("x", "f4")])
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")]).write(str(tmp_path / "flat.ply"))
    with pytest.raises(ValueError, match="no vertices with x, y and z"):
        read_cloud(tmp_path / "flat.ply")


@pytest.mark.parametrize("ending", READERS)
def test_broken_files_end_in_one_sentence(tmp_path, ending):
    path = tmp_path / f"broken{ending}"
    path.write_bytes(b"this is no cloud\n" * 9)
    with pytest.raises(ValueError, match=f"could not be read as {ending}"):
        read_cloud(path)


def test_missing_file_and_unknown_ending(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_cloud(tmp_path / "none.npy")
    with pytest.raises(ValueError, match=r"'cloud\.e57' does not end in one of \.npy"):
        read_cloud(tmp_path / "cloud.e57")


@pytest.mark.parametrize(("ending", "package"), [(".ply", "plyfile"), (".pcd", "pypcd4"), (".las", "laspy")])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, ending, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"cloud{ending}").write_bytes(b"")
    with pytest.raises(ImportError, match=rf"read with {package}: pip install 'sparseconv\[demo\]'"):
        read_cloud(tmp_path / f"cloud{ending}")


@pytest.mark.parametrize(("width", "size"), [(60.0, 0.2), (1000.0, 5.0), (0.3, 0.001), (0.0, 1.0)])
def test_default_voxel_size_follows_the_extent(width, size):
    points = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [width, width / 3, width / 9]
    )
    assert default_voxel_size(points) == pytest.approx(size)


def test_a_few_far_points_do_not_set_the_voxel_size():
    points = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0)) * 60
    points[:5] = 1e6
    assert default_voxel_size(points) == pytest.approx(0.2)
