"""How a run is started: shell launchers and the sweep. No training logic."""
