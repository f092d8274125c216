"""`show`: pictures of grids, tensors and plans whose parts are where the edges say."""

from __future__ import annotations

import re
import sys

import pytest
import torch

pytest.importorskip("matplotlib")

import sparseconv as sc
from sparseconv.viz import View, draw_lines, draw_window, new_figure, show
from sparseconv.viz.meetings import busiest_row, edges_into
from sparseconv.viz.view import CATEGORIES

LINE = sc.VoxelGrid(torch.tensor([[0, x] for x in (0, 1, 2, 4, 5, 7)]))
PLANE = sc.VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 5, 5], [1, 0, 0]]), voxel_size=0.5)
SPACE = sc.VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1], [1, 3, 3, 3]]), voxel_size=0.5)


@pytest.mark.parametrize(
    "plan",
    [
        sc.ConvolutionPlan(LINE, 3),
        sc.ConvolutionPlan(LINE, 2, stride=2),
        sc.ConvolutionPlan(LINE, 2, stride=2).transpose(),
        sc.ConvolutionPlan(LINE, 3, boundary=sc.Boundary.periodic((8,))),
        sc.ConvolutionPlan(LINE, taps=[(0,), (4,)]),
        sc.ConvolutionPlan(sc.VoxelGrid(torch.zeros(0, 2, dtype=torch.int32)), 3),
    ],
    ids=repr,
)
def test_a_line_is_drawn_for_each_edge(plan):
    with new_figure(5, 2) as figure:
        axes = figure.add_subplot()
        draw_lines(axes, plan)
    ends = {(line.get_xdata()[0], line.get_xdata()[-1]) for line in axes.lines if len(line.get_xdata()) == 2}
    source, target = (grid.positions()[:, 0].tolist() for grid in (plan.source, plan.target))
    edges = plan.kernel_map
    assert ends == {(source[a], target[b]) for a, b in zip(edges.in_rows.tolist(), edges.out_rows.tolist())}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_window_shows_the_inputs_of_its_output(stride, transposed):
    plan = sc.ConvolutionPlan(PLANE, 3, stride=stride)
    plan = plan.transpose() if transposed else plan
    for row in range(plan.kernel_map.num_out):
        neighbours = plan.kernel_map.neighbors[:, row]
        taps, inputs = edges_into(plan, row)
        assert taps.tolist() == (neighbours >= 0).nonzero()[:, 0].tolist()
        assert inputs.tolist() == neighbours[neighbours >= 0].tolist()
        with new_figure(6, 3) as figure:
            left, right = figure.subplots(1, 2)
            assert draw_window(left, right, plan, row) == row
        marks = {tuple(text.xy): text.get_text() for text in left.texts}
        assert marks == {
            tuple(plan.source.positions()[i].tolist()): str(tap) for tap, i in zip(taps.tolist(), inputs.tolist())
        }


def test_the_default_output_has_the_most_inputs():
    plan = sc.ConvolutionPlan(PLANE, 3)
    degree = (plan.kernel_map.neighbors >= 0).sum(0)
    assert degree[busiest_row(plan)] == degree.max()


@pytest.mark.parametrize("grid", [PLANE, SPACE], ids=["plane", "space"])
def test_one_item_of_a_batch_is_shown_in_its_unit(grid):
    view = show(grid, unit="mm", batch=1, live=False)
    axes = view.figure.axes[0]
    assert axes.get_title() == "1 voxel"
    assert axes.get_xlabel() == "x [mm]"
    values = show(sc.SparseTensor(grid, torch.arange(2.0 * len(grid)).view(-1, 2)), live=False).figure.axes[1]
    assert values.get_ylabel() == "norm of the features"


@pytest.mark.parametrize("of", [lambda g: g, lambda g: sc.ConvolutionPlan(g, 3)], ids=["grid", "plan"])
@pytest.mark.parametrize("grid", [PLANE, SPACE], ids=["plane", "space"])
def test_labels_say_voxels_where_there_is_no_voxel_size(grid, of):
    plain = sc.VoxelGrid(grid.coords)
    names = "xyz"[: grid.rank]

    def labels(what, **options):
        axes = show(what, live=False, **options).figure.axes[0]
        return [getattr(axes, f"get_{name}label")() for name in names]

    assert labels(of(plain)) == [f"{name} [voxels]" for name in names]
    assert labels(of(grid)) == list(names)
    assert labels(of(grid), unit="m") == [f"{name} [m]" for name in names]
    if isinstance(of(grid), sc.VoxelGrid):
        assert show(grid, live=False).figure.axes[1].get_ylabel() == names[-1]


@pytest.mark.parametrize("grid", [PLANE, SPACE], ids=["plane", "space"])
def test_whole_numbers_are_named_and_have_colours_of_their_own(grid):
    view = show(grid, torch.arange(len(grid)) % 2, names=("left", "right"), live=False)
    legend = view.figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["left", "right"]
    assert [handle.get_color() for handle in legend.legend_handles] == list(CATEGORIES[:2])


def test_every_reader_gets_the_picture(tmp_path):
    view = show(sc.ConvolutionPlan(SPACE, 3), live=False)
    assert view._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
    assert view.save(tmp_path / "plan.png").stat().st_size > 5000
    assert repr(view) == "View(picture: save('picture.png') writes it)"


@pytest.mark.parametrize("what", [SPACE, sc.ConvolutionPlan(SPACE, 3)], ids=["grid", "plan"])
def test_those_that_run_it_get_a_scene_too(what):
    pytest.importorskip("k3d")
    view = show(what, live=True)
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(view._repr_mimebundle_())
    assert len(view.scene.objects) == 1 + isinstance(what, sc.ConvolutionPlan)


def test_without_k3d_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "k3d", None)
    with pytest.raises(ImportError, match=re.escape("sparseconv[viz]")):
        show(SPACE, live=True)
    assert isinstance(show(SPACE), View)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: show(torch.ones(3)), TypeError, "VoxelGrid, a SparseTensor or a ConvolutionPlan; got Tensor"),
        (lambda: show(LINE), ValueError, "rank 2 or 3"),
        (lambda: show(PLANE, torch.ones(2)), ValueError, "must be (5,), one per voxel"),
        (lambda: show(sc.ConvolutionPlan(PLANE, 3), row=9), ValueError, "0 to 4; got 9"),
        (lambda: show(sc.ConvolutionPlan(PLANE.subset(torch.zeros(5).bool()), 3)), ValueError, "no output voxel"),
        (lambda: draw_lines(None, sc.ConvolutionPlan(PLANE, 3)), ValueError, "rank 1; got rank 2"),
        (lambda: draw_window(None, None, sc.ConvolutionPlan(LINE, 3)), ValueError, "rank 2; got rank 1"),
    ],
)
def test_what_cannot_be_shown_is_said(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_voxels_are_cubes_with_the_faces_that_a_viewer_sees():
    """A solid block of 3 x 3 x 3 shows three sides of nine faces each, and the limits are its outer faces."""
    block = sc.VoxelGrid(torch.cartesian_prod(*map(torch.arange, (1, 3, 3, 3))), voxel_size=0.5)
    axes = show(block).figure.axes[0]
    (faces,) = axes.collections
    assert len(faces.get_facecolor()) == 27
    assert axes.get_xlim3d() == pytest.approx((0.0, 1.5))
