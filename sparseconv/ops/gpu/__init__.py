"""Kernels of the operations on a GPU: codes along curves, maxima over the edges of a map."""
