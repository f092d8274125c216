"""The voxels that a window reaches."""
