"""Kernels made of scalar functions: their text, the axes they run over, their launches, and calls remembered."""
