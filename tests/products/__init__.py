"""Tests of the sparse scale and the seven products; `oracle.py` is the judge and imports nothing of the package."""
