"""The sums of products on the CPU."""
