"""Figures of docs/parallel.md that need no GPU are those of their file."""

from __future__ import annotations

import json

from train.process.places import ROOT


def test_the_page_shows_what_was_counted() -> None:
    found = json.loads((ROOT / "docs" / "performance" / "parallel_cpu.json").read_text())
    page = (ROOT / "docs" / "parallel.md").read_text()
    for row in found["balance"]["rows"]:
        shown = (row[name] for name in ("in_order", "blocks_of_1", "blocks_of_8", "blocks_of_32"))
        assert f"| {' | '.join(f'{value:.4f}' for value in shown)} |" in page
    assert f"put at {found['fit']['total'] / 2**30:.1f} GiB" in page
    assert f"{found['dense_parameters']['parameters'] / 1e6:.0f} M dense parameters" in page
