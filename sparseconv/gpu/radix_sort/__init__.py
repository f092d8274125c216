"""A stable radix sort of 32-bit keys on a GPU."""
