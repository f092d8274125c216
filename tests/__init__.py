"""The tests of sparseconv; `oracle.py` is the judge and imports nothing of the package."""
