"""The demonstrations behind ``sparseconv demo``: a brain that a sparse U-Net segments, and a cloud of your own."""
