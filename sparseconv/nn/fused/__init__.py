"""Convolution, norm, activation and loss in few launches and graph nodes."""
