"""Grids shown otherwise: as dense arrays, and as a picture."""
