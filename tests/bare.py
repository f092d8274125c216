"""``python -m pytest -p tests.bare``: as if neither Triton nor llvmlite were installed."""

import sys

sys.modules.update(dict.fromkeys(("triton", "llvmlite")))
