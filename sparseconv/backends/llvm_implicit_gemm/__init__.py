"""Sparse convolution as an implicit matrix product on the CPU. Importing this package loads no llvmlite."""

from __future__ import annotations
