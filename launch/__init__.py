"""Starting runs: shell launchers and the sweep. No training logic."""
