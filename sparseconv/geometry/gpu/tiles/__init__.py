"""Rows cut into tiles of like taps, with a list of live taps for each."""
