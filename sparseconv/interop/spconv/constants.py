"""Constants that code written for spconv reads."""

from __future__ import annotations

import os

#: weights are (C_out, *kernel, C_in), whatever the algorithm
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
#: layout of the weights in files that are loaded: "", "KRSC", "RSKC" or "RSCK"; from the environment, as in spconv
SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")
SPCONV_FX_TRACE_MODE = False

if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(f"SPCONV_SAVED_WEIGHT_LAYOUT must be KRSC, RSKC or RSCK; got {SAVED_WEIGHT_LAYOUT!r}")
