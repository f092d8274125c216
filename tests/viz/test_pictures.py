"""Pictures: what is where, and files that are whole or absent."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from sparseconv import VoxelGrid
from sparseconv.viz import (
    dense_against_sparse,
    new_figure,
    render_surface,
    save_figure,
    scatter3d,
    show_slice,
    slice_image,
)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_agree_with_the_dense_array(axis):
    generator = torch.Generator().manual_seed(axis)
    dense = torch.rand(1, 1, 5, 6, 7, generator=generator) * (torch.rand(1, 1, 5, 6, 7, generator=generator) < 0.4)
    grid, features = VoxelGrid.from_dense(dense, voxel_size=0.5, origin=-1.0)
    image, box = slice_image(grid, features[:, 0], axis, at=-1.0 + 0.5 * 2 + 0.1)
    whole = grid.to_dense(features)[0, 0].select(axis, 2 - grid.extent.start[axis]).T
    np.testing.assert_array_equal(np.nan_to_num(image), whole.numpy())
    across, up = (a for a in range(3) if a != axis)
    assert box[1] - box[0] == pytest.approx(0.5 * grid.extent.shape[across])
    assert box[3] - box[2] == pytest.approx(0.5 * grid.extent.shape[up])


def test_slices_refuse_what_they_cannot_show():
    grid = VoxelGrid(torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="rank 3"):
        slice_image(grid, torch.ones(1), 0, 0.0)
    with pytest.raises(ValueError, match="one per voxel"):
        slice_image(VoxelGrid(torch.tensor([[0, 1, 2, 3]])), torch.ones(2), 0, 0.0)


def test_a_ball_is_round_lit_from_above_and_coloured_by_side():
    line = torch.arange(32.0) - 15.5
    ball = torch.sigmoid(10 - (line[:, None, None] ** 2 + line[None, :, None] ** 2 + line**2).sqrt())
    colours = torch.zeros(3, 32, 32, 32)
    colours[0, :, :16] = 1  # red where y is low, green where it is high
    colours[1, :, 16:] = 1
    image = render_surface(ball, colours, azimuth=0, elevation=0, pixels=111)
    met = image[..., 3] > 0
    radius = 10 / (np.sqrt(3) * 32) * 111
    assert met.sum() == pytest.approx(np.pi * radius**2, rel=0.03)
    left, right = image[55, 45], image[55, 65]
    assert left[0] > left[1]  # from +x, low y is on the left
    assert right[1] > right[0]
    assert image[45, 55, :2].sum() > image[65, 55, :2].sum()


def test_nothing_solid_is_transparent():
    assert render_surface(torch.zeros(4, 5, 6), torch.zeros(3, 4, 5, 6), pixels=16)[..., 3].sum() == 0


def test_products_are_counted():
    cells = np.zeros((6, 8), bool)
    cells[2, 1:5] = True
    with new_figure(4, 2) as figure:
        left, right = figure.subplots(1, 2)
        assert dense_against_sparse(left, right, cells, (2, 2)) == (6 * 8 * 9, 2 + 3 + 3 + 2)


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_figures_are_saved_whole(tmp_path, ending):
    grid = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3]]), voxel_size=2.0)
    with new_figure(5, 3) as figure:
        show_slice(figure.add_subplot(1, 2, 1), grid, torch.tensor([1.0, 2.0]), 2, 1.0, unit="mm")
        scatter3d(figure.add_subplot(1, 2, 2, projection="3d"), grid, torch.tensor([1.0, 2.0]))
    path = save_figure(figure, tmp_path / f"two{ending}")
    assert path.stat().st_size > 1000
    assert figure.axes[0].get_xlabel() == "x [mm]"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_save_leaves_the_old_picture(tmp_path):
    path = tmp_path / "kept.png"
    path.write_text("old")

    class Interrupted:
        def savefig(self, name, dpi):
            with open(name, "w") as half:
                half.write("half of a picture")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_figure(Interrupted(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sparseconv\[viz\]"), new_figure(1, 1):
        pass


@pytest.mark.parametrize("size", [0.05, 1.0])
@pytest.mark.parametrize("cells", [6, 24])
def test_a_dot_of_true_size_is_as_wide_as_its_voxel(cells, size):
    from mpl_toolkits.mplot3d import proj3d

    side = torch.arange(cells)
    coords = torch.nn.functional.pad(torch.cartesian_prod(side, side, side), (1, 0))
    grid = VoxelGrid(coords, voxel_size=size)
    with new_figure(6, 6) as figure:
        axes = figure.add_subplot(projection="3d")
        dots = scatter3d(axes, grid, torch.zeros(len(grid)), s=1.6, true_size=True)
        width = float(np.sqrt(dots.get_sizes()[0])) * figure.dpi / 72  # in pixels
        middle = grid.positions().mean(0).numpy()

        def place(step):
            x, y, _ = proj3d.proj_transform(*(middle + step), axes.get_proj())
            return axes.transData.transform((x, y))

        seen = [np.linalg.norm(place(size * axis) - place(0 * axis)) for axis in np.eye(3)]
    assert 0.8 * max(seen) < width < 1.3 * max(seen) * np.sqrt(2)
