"""What a run leaves for its reader: metrics, traces, plots and the versions that made it."""
