"""The sums of products on a GPU."""
