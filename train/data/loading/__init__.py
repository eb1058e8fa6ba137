"""From prepared columns to batches: workers, requests dealt over ranks, dropped ids and sampled negatives."""
