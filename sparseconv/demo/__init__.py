"""The demonstrations behind ``sparseconv demo``: a brain that a sparse U-Net learns to segment, and a cloud of yours."""
