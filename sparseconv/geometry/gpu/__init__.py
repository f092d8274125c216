"""Kernel maps on a GPU: coordinates -> table -> search -> row order -> schedule, edge lists and weight-gradient splits.

Each stage is a file with its kernels. Its functions launch, read nothing back and return plain data. Their docstrings
follow one scene: three voxels on a line at x = 0, 1 and 5 (rows 0, 1 and 2), and a window of three taps (-1, 0, +1):

    table         one block of 16 cells, with rows in cells 0, 1 and 5
    search        row 0 sees taps 1 and 2, row 1 taps 0 and 1, row 2 tap 1: counts (1, 3, 1)
    row_order     keys (2, 6, 1): rows in the order 2, 0, 1
    schedule      of two rows: rows 2 and 0 with taps 1 and 2, row 1 with taps 0 and 1
    edge_lists    tap 0: 0 -> 1; tap 1: 0 -> 0, 1 -> 1, 2 -> 2; tap 2: 1 -> 0
    wgrad_splits  of two pairs: one for tap 0, two for tap 1, one for tap 2
    reached       a window of two cells at stride 2 reaches the coarse voxels 0 and 2

`hash_probe` and `taps` have the look-ups that kernels share, `lists` the data that is left, `work_lists` keeps it with
a map.
"""
