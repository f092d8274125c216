"""Constants that code written for spconv reads."""

from __future__ import annotations

import os

#: weights are (C_out, *kernel, C_in), whatever the algorithm
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
#: layout of the weights in files that are loaded: "", "KRSC", "RSKC" or "RSCK"; from the environment, as in spconv
SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")
SPCONV_FX_TRACE_MODE = False
#: they choose spconv's kernels: code may read and set them, without effect
SPCONV_ALLOW_TF32, SPCONV_DO_SORT, SPCONV_USE_DIRECT_TABLE = False, True, True
#: pooling with spconv's numbers, for networks that were trained with them: maxima start from 0, and the gradient of a
#: mean is multiplied by the number of its voxels instead of divided. Set it, or the environment's variable to 1
POOL_AS_SPCONV = os.getenv("SPARSECONV_POOL_AS_SPCONV", "0") == "1"
#: read the memory of the weight (C_out, 1, 1, 1, C_in) of a layer of one tap at stride 1 as (C_in, C_out), which
#: spconv's checkpoints are made for; False reads it as it is shaped. The environment's variable 0 says so, too
ONE_TAP_AS_SPCONV = os.getenv("SPARSECONV_ONE_TAP_AS_SPCONV", "1") != "0"

if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(f"SPCONV_SAVED_WEIGHT_LAYOUT must be KRSC, RSKC or RSCK; got {SAVED_WEIGHT_LAYOUT!r}")
