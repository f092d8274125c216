"""Readers of clouds: round trips through files written here, and what is refused."""

from __future__ import annotations

import io
import resource
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch

from sparseconv.demo import clouds
from sparseconv.demo.clouds import READERS, default_voxel_size, read_cloud

POINTS = np.random.default_rng(0).uniform(-50, 50, (200, 3)).round(3)


def write(path, points):
    """Write points (M, 3) in the format of the path's ending, with that format's own package."""
    if path.suffix == ".npy":
        np.save(path, points)
    elif path.suffix == ".npz":
        np.savez(path, intensity=np.ones(len(points)), xyz=points)
    elif path.suffix == ".bin":
        np.hstack([points, np.full((len(points), 1), 0.25)]).astype("<f4").tofile(path)
    elif path.suffix in (".xyz", ".txt"):
        np.savetxt(path, np.hstack([points, points]), fmt="%.3f")
    elif path.suffix == ".csv":
        turned = np.hstack([points[:, ::-1], np.ones((len(points), 1))])
        np.savetxt(path, turned, fmt="%.3f", delimiter=",", header="Z,Y,X,intensity", comments="")
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
    # .pcd and .bin were written in 32 bits, .las in millimetres; the others keep every bit
    np.testing.assert_allclose(
        points.numpy(), POINTS, rtol=0, atol={".pcd": 5e-6, ".bin": 5e-6, ".las": 1e-9, ".laz": 1e-9}.get(ending, 0)
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
        (np.zeros((5, 2)), r"shape \(5, 2\), not \(M, 3\): one row per point"),
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
    with pytest.raises(ValueError, match="it contains a, b; name the positions points"):
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
    path.write_bytes(b"this is no cloud\n" * 9 + b"!")
    with pytest.raises(ValueError, match=f"could not be read as {ending}"):
        read_cloud(path)


def test_missing_file_and_unknown_ending(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_cloud(tmp_path / "none.npy")
    with pytest.raises(ValueError, match=r"'cloud\.e57' has none of the known suffixes \.npy"):
        read_cloud(tmp_path / "cloud.e57")


@pytest.mark.parametrize(("ending", "package"), [(".ply", "plyfile"), (".pcd", "pypcd4"), (".las", "laspy")])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, ending, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"cloud{ending}").write_bytes(b"")
    with pytest.raises(ImportError, match=rf"files need {package}: pip install 'sparseconv\[demo\]'"):
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


# ---- what is likely meant


def test_a_transposed_cloud_is_refused(tmp_path):
    for rows in (3, 4, 6):
        np.save(tmp_path / "turned.npy", np.random.default_rng(0).random((rows, 5000), np.float32))
        with pytest.raises(ValueError, match=rf"shape \({rows}, 5000\), not \(M, 3\): transpose it"):
            read_cloud(tmp_path / "turned.npy")


def test_points_that_are_not_finite_are_dropped_where_that_is_asked(tmp_path):
    np.save(tmp_path / "holes.npy", np.array([[0, 0, 0], [np.nan, 0, 0], [1, 2, 3], [0, np.inf, 0]]))
    with pytest.raises(ValueError, match=r"2 of the 4 points .* drop_nonfinite=True \(--drop-nonfinite\)"):
        read_cloud(tmp_path / "holes.npy")
    assert read_cloud(tmp_path / "holes.npy", drop_nonfinite=True).tolist() == [[0, 0, 0], [1, 2, 3]]
    np.save(tmp_path / "none.npy", np.full((4, 3), np.nan))
    with pytest.raises(ValueError, match="all 4 points"):
        read_cloud(tmp_path / "none.npy", drop_nonfinite=True)


def test_lidars_of_four_and_five_numbers_are_told_apart_or_asked_for(tmp_path):
    path = tmp_path / "sweep.pcd.bin"
    rng = np.random.default_rng(0)
    for count in (100, 101, 104):  # 100 points of 4 numbers have the size of 80 points of 5
        kitti = np.hstack([POINTS[:count], rng.random((count, 1))]).astype("<f4")
        kitti.tofile(path)
        np.testing.assert_array_equal(read_cloud(path).numpy(), kitti[:, :3])
        nuscenes = np.hstack([POINTS[:count], rng.integers(0, 255, (count, 1)), np.arange(count)[:, None] % 32])
        nuscenes = nuscenes.astype("<f4")
        nuscenes.tofile(path)
        np.testing.assert_array_equal(read_cloud(path).numpy(), nuscenes[:, :3])
    np.zeros(80, "<f4").tofile(path)
    with pytest.raises(ValueError, match=r"do not tell which: pass columns=4 or columns=5"):
        read_cloud(path)
    assert len(read_cloud(path, columns=4)) == 20
    assert len(read_cloud(path, columns=5)) == 16
    for wrong in (3, 7):
        with pytest.raises(ValueError, match="4 or 5; got"):
            read_cloud(path, columns=wrong)
    np.zeros(81, "<f4").tofile(path)
    with pytest.raises(ValueError, match="not a multiple of"):
        read_cloud(path)


@pytest.mark.parametrize(
    "text",
    [
        "1 2 3 255\n4 5 6 0\n",
        "# a remark\n\n1\t2\t3\n4\t5\t6\n",
        "// from CloudCompare\n1, 2, 3\n4, 5, 6\n",
        "x;y;z\n1;2;3\n4;5;6\n",
        'label,"X","Y","Z"\n7,1,2,3\n7,4,5,6\n',
        "\ufeffX Y Z\n1 2 3\n4 5 6",
    ],
)
def test_text_in_the_forms_that_programs_write(tmp_path, text):
    (tmp_path / "cloud.txt").write_text(text, encoding="utf-8")
    assert read_cloud(tmp_path / "cloud.txt").tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a b c\n1 2 3\n", "neither numbers nor the names x, y and z"),
        ("1 2 3\n4 5\n", "could not be read"),
        ("1 2 3\nfour 5 6\n", "could not be read"),
        ("1 2\n4 5\n", r"shape \(2, 2\)"),
        ("# nothing\n", "holds no points"),
        ("1 2 nan\n", "NaN or infinite"),
    ],
)
def test_text_that_is_no_cloud(tmp_path, text, sentence):
    (tmp_path / "cloud.xyz").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_cloud(tmp_path / "cloud.xyz")


# ---- headers that ask for more than their file holds


def changed(path, form, values):
    """Write numbers over a file: {offset: value}."""
    data = bytearray(path.read_bytes())
    for offset, value in values.items():
        struct.pack_into(form, data, offset % len(data), value)
    path.write_bytes(data)


def refused_at_once(path, sentence):
    """What is refused costs some seconds of computing, on a machine with much else to do as on an idle one."""

    def computed():
        return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    begin = computed()
    with pytest.raises(ValueError, match=sentence):
        read_cloud(path)
    assert computed() - begin < 30


def test_an_array_larger_than_its_file_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 3)})
    (tmp_path / "huge.npy").write_bytes(header.getvalue() + bytes(240))
    refused_at_once(tmp_path / "huge.npy", "could not be read")
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("xyz.npy", header.getvalue() + bytes(240))
    refused_at_once(tmp_path / "huge.npz", "could not be read")


def test_an_archive_that_inflates_a_thousandfold_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", xyz=np.zeros((10_000_000, 3)))
    assert (tmp_path / "bomb.npz").stat().st_size < 1 << 20
    refused_at_once(tmp_path / "bomb.npz", "unfolds to 240,000,128 bytes")


def test_an_archive_whose_members_share_a_name_is_refused(tmp_path):
    """Readers disagree in which of the two they take."""
    write(tmp_path / "a.npz", POINTS)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], archive.read(archive.namelist()[0]))
    with pytest.raises(ValueError, match="two of its members are called"):
        read_cloud(tmp_path / "a.npz")


def test_archives_are_held_to_their_checksums(tmp_path):
    write(tmp_path / "a.npz", POINTS)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read_cloud(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("ending", "form", "at", "value", "sentence"),
    [
        (".las", "<I", 100, 2**32 - 1, "4,294,967,295 variable length records, more than"),
        (".las", "<I", 243, 2**32 - 1, "bytes of memory"),
        (".las", "<Q", 247, 2**60, "could not be read"),
        (".las", "<Q", 247, 300, "announces 300 points; it contains 200"),
        (".laz", "<I", 100, 2**32 - 1, "4,294,967,295 variable length records, more than"),
        (".laz", "<Q", 247, 2**60, "could not be read"),
    ],
)
def test_counts_of_las_beyond_the_file_are_refused(tmp_path, ending, form, at, value, sentence):
    path = tmp_path / f"cloud{ending}"
    write(path, POINTS)
    changed(path, form, {at: value})
    refused_at_once(path, sentence)


def test_a_table_of_chunks_beyond_the_file_is_refused(tmp_path):
    path = tmp_path / "cloud.laz"
    write(path, POINTS)
    data = path.read_bytes()
    (offset,) = struct.unpack_from("<I", data, 96)
    (table,) = struct.unpack_from("<q", data, offset)
    changed(path, "<I", {table + 4: 2**32 - 1})  # 35 GB of entries
    refused_at_once(path, "crashed or ran out of memory|bytes of memory")


@pytest.mark.parametrize("kind", ["ascii", "binary", "binary_compressed"])
def test_counts_of_pcd_beyond_the_file_are_refused(tmp_path, kind):
    head = "VERSION 0.7\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 4000000000\nWIDTH 9\nHEIGHT 1\nPOINTS 9\n"
    (tmp_path / "cloud.pcd").write_bytes(f"{head}DATA {kind}\n".encode() + bytes(108))
    pytest.importorskip("pypcd4")
    refused_at_once(tmp_path / "cloud.pcd", "could not be read")


def test_counts_of_ply_beyond_the_file_are_refused(tmp_path):
    pytest.importorskip("plyfile")
    head = "ply\nformat binary_little_endian 1.0\nelement vertex 9000000000\n"
    head += "property float x\nproperty float y\nproperty float z\nend_header\n"
    (tmp_path / "cloud.ply").write_bytes(head.encode() + bytes(108))
    refused_at_once(tmp_path / "cloud.ply", "early end-of-file")


def test_a_reader_may_wait_for_its_turn(tmp_path, monkeypatch):
    """On a busy machine a process computes for a part of the time alone."""
    pytest.importorskip("plyfile")
    write(tmp_path / "a.ply", POINTS)
    reader = "import sys, time, numpy\ntime.sleep(2.5)\nnumpy.save(sys.argv[3], numpy.ones((2, 3)))"
    (tmp_path / "foreign.py").write_text(reader)
    monkeypatch.setattr(clouds, "__file__", str(tmp_path / "clouds.py"))
    monkeypatch.setattr(clouds, "PATIENCE", 2.0)
    monkeypatch.setattr(clouds, "BUSY", 100)
    assert read_cloud(tmp_path / "a.ply").tolist() == [[1.0] * 3] * 2


def test_a_reader_that_dies_or_never_ends_is_an_error_here(tmp_path, monkeypatch):
    pytest.importorskip("plyfile")
    write(tmp_path / "a.ply", POINTS)
    monkeypatch.setattr(clouds, "BUSY", 100)
    for line, patience, sentence in (
        ("import os; os.abort()", clouds.PATIENCE, "crashed or ran out of memory"),
        ("while True: pass", 0.5, "not finished after 1 s of computing"),
        ("import time; time.sleep(600)", 0.01, "not finished after 1 s$"),
        ("raise SystemExit('no')", clouds.PATIENCE, "no"),
    ):
        (tmp_path / "foreign.py").write_text(line)
        monkeypatch.setattr(clouds, "__file__", str(tmp_path / "clouds.py"))
        monkeypatch.setattr(clouds, "PATIENCE", patience)
        with pytest.raises(ValueError, match=sentence):
            read_cloud(tmp_path / "a.ply")
