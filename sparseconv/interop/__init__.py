"""Other libraries' checkpoints, layouts and names."""

from sparseconv.interop.checkpoints import Report, convert, convert_state, load, read, write
from sparseconv.interop.layouts import LAYOUTS, Layout, hyper_cross_taps, permute
from sparseconv.interop.published import PUBLISHED, load_published, published_family

__all__ = [
    "LAYOUTS",
    "PUBLISHED",
    "Layout",
    "Report",
    "convert",
    "convert_state",
    "hyper_cross_taps",
    "load",
    "load_published",
    "permute",
    "published_family",
    "read",
    "write",
]
