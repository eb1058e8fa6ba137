"""`train.commands.speed` on the command line."""

from __future__ import annotations

from pathlib import Path

from tests.launching import python, run


def test_a_run_that_is_too_short_is_refused_at_once(tmp_path: Path) -> None:
    """It was refused after all ranks had met; and where the command stands, it must find the configuration."""
    done = run(python("-m", "train.commands.speed", "+experiment=synthetic", "runtime.steps=19"), tmp_path, check=False)
    assert "a speed needs at least 20, e.g. runtime.steps=100" in done.stderr
    assert "in start" not in done.stderr  # of `distributed`, where ranks wait for each other
    assert not list(tmp_path.iterdir())
