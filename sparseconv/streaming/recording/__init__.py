"""What a network does to rows, found by running it on a sample."""
