"""What an importable module of a broken installation is like."""

raise ImportError("libcudart.so.11: cannot open shared object file")
