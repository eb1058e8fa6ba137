"""From a behaviour sequence to a few tokens."""
