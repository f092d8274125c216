"""Kernel maps on a CPU: sorted keys, and lines of voxels met with lines of taps."""
