"""The colors of every picture: Okabe and Ito's set, which the color-blind can tell apart.

Source: Okabe and Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

#: what is there, what is pointed at, and what stands beside
INK, WINDOW, SECOND = "#0072B2", "#D55E00", "#E69F00"
#: empty cells, faint lines, and what is only there to compare with
EMPTY, ROW, GREY = "#ffffff", "#cfd8e3", "#8a8f98"
#: colors of shards, labels and other whole numbers, in turn
CATEGORIES = (INK, SECOND, "#009E73", "#CC79A7", "#56B4E9", WINDOW, "#F0E442", "#555555")
#: maps of matplotlib's for numbers from low to high, and for numbers on both sides of zero
SEQUENTIAL, DIVERGING = "viridis", "coolwarm"
