"""What a window sees from each row: masks of taps, counts of edges."""
