"""Other libraries' checkpoints, layouts and names.

Each library has a package here, whose files have the names of its modules. Where to read what a name becomes:

- spconv's `SubMConv3d`, `SparseConv3d`, `SparseInverseConv3d`: a plan between the voxels of `SparseConvTensor`, in
  `spconv/pytorch/conv.py`; `spconv/pytorch/geometry.py` finds it and keeps it under the ``indice_key``
- MinkowskiEngine's `MinkowskiConvolution` and pools: `CoordinateManager.plan` between the voxels of two keys, in
  `minkowski/layers.py` and `minkowski/coordinate_manager.py`
- torchsparse's `Conv3d`: `conv3d` in `torchsparse/nn/functional.py`, plans of `torchsparse/geometry.py` in the cache of
  the tensors
- FlexGEMM's `sparse_submanifold_conv3d`: a plan in the neighbor cache, `flex_gemm/ops/spconv.py`
- fVDB's `ConvolutionPlan` and `GridBatch`: `fvdb/convolution_plan.py`, `fvdb/grid_batch.py`

`arguments.py` has what they share: sizes, checks of coordinates and features, classes of layers, maps in a trace;
`installing.py` makes the libraries' module names resolve to these.
"""

from sparseconv.interop.checkpoints import Report, convert, convert_state, load, read, write
from sparseconv.interop.layouts import LAYOUTS, Layout, hyper_cross_taps, permute
from sparseconv.interop.published import PUBLISHED, load_published, published_family

__all__ = [
    "LAYOUTS",
    "PUBLISHED",
    "Layout",
    "Report",
    "convert",
    "convert_state",
    "hyper_cross_taps",
    "load",
    "load_published",
    "permute",
    "published_family",
    "read",
    "write",
]
