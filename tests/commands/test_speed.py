"""`train.commands.speed`, where it ends before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from train.commands import speed


def test_a_run_that_is_too_short_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused after all ranks had met; and where the command stands, it must find the configuration."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a speed needs at least 20, e\.g\. runtime\.steps=100"):
        speed.main(["+experiment=synthetic", "runtime.steps=19"])
    assert not dist.is_initialized()
    assert not list(tmp_path.iterdir())
