"""Single layers, ours and the peers': which are measured, by which processes, how results are kept and shown."""
