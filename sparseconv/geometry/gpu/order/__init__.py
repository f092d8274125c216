"""Rows in an order in which neighbours share most of their taps."""
