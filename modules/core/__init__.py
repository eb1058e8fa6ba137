"""What layers share and no model is made of: checks, side streams, imports by name."""
