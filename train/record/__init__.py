"""What a run leaves for its reader: metrics, traces, plots."""
