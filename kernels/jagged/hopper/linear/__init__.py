"""`jagged_linear`: forward, and all gradients."""
