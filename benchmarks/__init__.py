"""What sparseconv and its peers take, in time and memory: ``python -m benchmarks --help``."""
