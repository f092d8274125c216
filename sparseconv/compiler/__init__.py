"""Networks as programs of torch.compile and torch.export: operators, grids and plans in a trace, the backend."""
