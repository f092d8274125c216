"""Attention over voxels."""
