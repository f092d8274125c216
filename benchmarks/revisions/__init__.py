"""Two revisions of the package in turns on one device: ``python -m benchmarks.revisions --help``."""
