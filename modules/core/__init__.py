"""What layers share and no model is made of: checks, side streams, the costs of a model."""
