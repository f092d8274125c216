"""Other libraries' checkpoints, layouts and names."""

from sparseconv.interop.checkpoints import Report, convert, convert_state, load, read, write
from sparseconv.interop.layouts import LAYOUTS, Layout, hyper_cross_taps, permute

__all__ = [
    "LAYOUTS",
    "Layout",
    "Report",
    "convert",
    "convert_state",
    "hyper_cross_taps",
    "load",
    "permute",
    "read",
    "write",
]
