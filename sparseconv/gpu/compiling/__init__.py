"""Kernels compiled ahead by processes beside this one, into Triton's cache."""
