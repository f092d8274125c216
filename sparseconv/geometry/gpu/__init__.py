"""Kernel maps on a GPU: coordinates -> hash table -> window search -> row order -> tiles -> jobs -> edge lists."""
