"""What lies between a request and the exported program."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from modules.models.scoring import Sequences
from tests.modules.factories import random_spec
from train.commands import score
from train.config.schema import SyntheticConfig
from train.data import build_source
from train.serving import scorer
from train.serving.scorer import SMALLEST, Replayed, Scorer, _rounded_up

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

    replayed = Replayed(arch, spec, torch.device(device))
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


OTHERS = {"dtype": "float32", "device": "cpu", "compiled": False, "tasks": {}}


class Runs:
    """Its pickle makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.made),)


@pytest.mark.reliability("an `export.json` that names a foreign module", "refused; nothing is imported")
def test_operators_are_those_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_operators.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil_operators", "kernels_of_mine.evil", "gemsmith.evil_operators"):
        (tmp_path / "export.json").write_text(json.dumps({"operators": [name], "program": None} | OTHERS))
        with pytest.raises(ValueError, match=f"needs operators of '{name}', which is none of kernels"):
            Scorer(tmp_path)
    scorer._import_operators(["gemsmith.kernels.jagged"])  # as a wheel writes it
    scorer._import_operators(["kernels.jagged", "json"])  # imported already, by whoever trusts it


@pytest.mark.reliability("code in the sample inputs or constants of `model.pt2`", "refused; nothing is unpickled")
def test_a_program_is_loaded_without_its_pickles(tmp_path: Path) -> None:
    program, made = tmp_path / "model.pt2", tmp_path / "made"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 1), (torch.ones(3, 2),)), program)
    assert scorer._load_program(program)(torch.ones(3, 2)).shape == (3, 1)
    payload = io.BytesIO()
    torch.save((Runs(made),), payload)
    for place in ("sample_inputs/model.pt", "constants/opaque_obj_0"):
        forged = tmp_path / "forged.pt2"
        with zipfile.ZipFile(program) as old, zipfile.ZipFile(forged, "w") as new:
            kept = [name for name in old.namelist() if not name.endswith(place)]
            root = kept[0].partition("/")[0]
            for name in kept:
                new.writestr(name, old.read(name))
            new.writestr(f"{root}/data/{place}", payload.getvalue())
        with pytest.raises(ValueError, match="forged.pt2 holds"):
            scorer._load_program(forged)
    assert not made.exists()
    assert scorer.WEIGHTS_ONLY not in os.environ


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    source = build_source(SyntheticConfig(num_requests=20, eval_requests=2))
    batch = source.batch("test", np.array([0]))
    scorer._refuse_not_finite(batch, source.spec)
    batch.candidate_dense[0, 1] = torch.nan
    with pytest.raises(
        ValueError, match=f"candidate 0 has {source.spec.candidate_dense[1]}=nan; numbers must be finite"
    ):
        scorer._refuse_not_finite(batch, source.spec)
