"""Checkpoints: saving, resuming, starting from another run's."""
