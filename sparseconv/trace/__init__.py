"""What a network does to a scene, recorded on a few voxels: streaming and quantization are passes over it."""
