"""What lies between a request and the exported program."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from modules.models.scoring import Sequences
from tests.modules.factories import random_spec
from train.commands import score
from train.commands.score import SMALLEST, Scorer, _Replayed, _rounded_up

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")]


@pytest.mark.parametrize(
    ("count", "most", "size"), [(1, 10000, SMALLEST), (16, 10000, 16), (17, 10000, 32), (9000, 10000, 10000), (3, 5, 5)]
)
def test_candidates_are_filled_up_with_zeros(count: int, most: int, size: int) -> None:
    candidates = torch.randn(count, 2, 3)
    filled, offsets = _rounded_up(candidates, most)
    assert offsets.tolist() == [0, size]
    assert torch.equal(filled[:count], candidates)
    assert filled[count:].shape == (size - count, 2, 3)
    assert not filled[count:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_replayed_architectures_take_and_give_what_others_do(device: str) -> None:
    spec = random_spec(num_events=2)

    def arch(request: Tensor, candidate: Tensor, offsets: Tensor, histories: Sequences) -> Tensor:
        sums = torch.stack([(values.sum() - ends[-1] + times.sum()) for values, ends, times in histories.values()])
        weighted = sums * torch.arange(1, 3, device=sums.device)  # the order of event types counts
        return candidate.sum((1, 2)) * offsets[-1] + request.sum() + weighted.sum()

    def inputs() -> tuple[Tensor, Tensor, Tensor, Sequences]:
        request, candidate, *values = (torch.randn(rows, 2, 3, device=device) for rows in (1, 7, 5, 5))
        ends = torch.tensor([0, 5], device=device)
        histories = {
            event.name: (part.flatten(1), ends, torch.randn(5, device=device))
            for event, part in zip(spec.histories, values, strict=True)
        }
        return request, candidate, torch.tensor([0, 7], device=device), histories

    replayed = _Replayed(arch, spec, torch.device(device))
    for _ in range(5):  # on a GPU the third is captured
        arguments = inputs()
        torch.testing.assert_close(replayed(*arguments), arch(*arguments))


@pytest.mark.parametrize(
    ("returncode", "message"),
    [(-signal.SIGSEGV, "SIGSEGV ends a process that loads it.* CXX"), (1, r"cannot be loaded \(OSError: no room\)")],
)
def test_a_package_that_cannot_be_loaded_is_told_in_words(
    returncode: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export.json").write_text("{}")
    ended = SimpleNamespace(returncode=returncode, stderr="Traceback\nOSError: no room\n")
    monkeypatch.setattr(score.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RuntimeError, match=message):
        score.check(tmp_path, cast(Any, None), torch.float32, cast(Any, None))
    with pytest.raises(ValueError, match="holds no exported model"):
        Scorer(tmp_path)
