"""Colours of one picture are told apart by everybody."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparseconv.viz import new_figure, palette

#: linear RGB as it is seen without one kind of cone (Machado, Oliveira and Fernandes, 2009, severity 1)
SEEN = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour like #0072B2, under daylight."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = np.asarray(TO_XYZ) @ np.clip(np.asarray(seen) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", SEEN)
def test_categories_are_told_apart(eye):
    places = [lab(colour, SEEN[eye]) for colour in palette.CATEGORIES]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 15


def test_the_measure_knows_red_from_green_by_eyes_with_all_cones_alone():
    red, green = "#d62728", "#2ca02c"  # of matplotlib's ten
    assert np.linalg.norm(lab(red, SEEN["all cones"]) - lab(green, SEEN["all cones"])) > 100
    assert np.linalg.norm(lab(red, SEEN["no green"]) - lab(green, SEEN["no green"])) < 10


def test_new_figures_take_the_palette():
    pytest.importorskip("matplotlib")
    with new_figure(3, 2) as figure:
        axes = figure.add_subplot()
        lines = [axes.plot([0, 1])[0].get_color() for _ in palette.CATEGORIES]
        assert axes.imshow(np.eye(2)).get_cmap().name == palette.SEQUENTIAL
    assert lines == list(palette.CATEGORIES)
