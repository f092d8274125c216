"""Pairs of each tap cut into runs for the weight gradient."""
