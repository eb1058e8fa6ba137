"""Attention: within a jagged sequence, of candidates to one, between tokens; with softmax or GDPA's activations."""
