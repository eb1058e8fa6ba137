"""Counts, rates and recency of rows strictly before a request, by any keys: `data.statistics`."""
