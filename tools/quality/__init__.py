"""Quality of models on public data: runs, stored results, docs/quality.md, published tables."""
