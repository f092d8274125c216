"""Edges by tap, as lists of input and output rows."""
