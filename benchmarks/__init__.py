"""What sparseconv and its peers take, in time and memory: ``python -m benchmarks --help``."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: committed results and the documents' pictures
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
# real scans are read from `shared/data` beside the checkout, unless the environment names another folder
os.environ.setdefault("SPARSECONV_BENCH_DATA", str(ROOT.parent / "shared" / "data"))
