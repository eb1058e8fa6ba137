"""Optimisers of dense parameters and of tables, averages, guards."""
