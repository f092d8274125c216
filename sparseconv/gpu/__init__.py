"""Launches, memory, streams and a sort on a GPU, for all rooms above, whatever they compute."""
