"""Kernel maps on a GPU: coordinates -> hash table -> window search -> row order -> tiles -> jobs -> edge lists.

Each stage is a folder. Its host function launches, reads nothing back, and returns plain data. Their docstrings follow
one scene, three voxels on a line at x = 0, 1 and 5 (rows 0, 1 and 2), through a window of three taps (-1, 0, +1):

    hash_table   one block of 16 cells, with rows in cells 0, 1 and 5
    window       row 0 sees taps 1 and 2, row 1 taps 0 and 1, row 2 tap 1: counts (1, 3, 1)
    order        keys (2, 6, 1): rows in the order 2, 0, 1
    tiles        of two rows: rows 2 and 0 with taps 1 and 2, row 1 with taps 0 and 1
    pairs        tap 0: 0 -> 1; tap 1: 0 -> 0, 1 -> 1, 2 -> 2; tap 2: 1 -> 0
    jobs         of two pairs: one for tap 0, two for tap 1, one for tap 2
    reached      a window of two cells at stride 2 reaches the coarse voxels 0 and 2

`work_lists` keeps what a map was asked for.
"""
