"""Coordinates -> rows: a hash table of occupied blocks of cells."""
