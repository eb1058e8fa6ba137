"""`launch.scaling_law` over folders as the trainer leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.scaling_law import fit, main, read

NOISE = (0.001, -0.0005, -0.0005)


def write(folder: Path, model: str, slope: float, flops: tuple[float, ...] = (1e6, 1e7, 1e8)) -> Path:
    """Runs of a model of these sizes, three seeds each, on the line 0.9 + slope (log10(FLOPs) - 6)."""
    for index, operations in enumerate(flops):
        for seed, noise in enumerate(NOISE):
            run = folder / f"{index}-{seed}"
            run.mkdir(parents=True)
            ne = 0.9 + slope * index + noise
            results = {"best_ne": ne, "examples_per_s": 500.0, "tflops_per_s": operations * 500 / 2 / 1e12}
            (run / "results.json").write_text(json.dumps(results))
            (run / "config.json").write_text(json.dumps({"config": {"model": {"name": model}}, "world_size": 2}))
    return folder


def test_the_line_of_each_model_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steep, flat = write(tmp_path / "steep", "kunlun", -0.02), write(tmp_path / "flat", "din", 0)
    assert main([str(steep), str(flat)]) == 0
    written = json.loads((steep / "scaling_law.json").read_text())
    law = written["laws"]["kunlun"]
    assert law["slope"] == pytest.approx(-0.02)
    assert law["intercept"] == pytest.approx(0.9 + 6 * 0.02)
    assert law["decades"] == pytest.approx(2)
    assert law["runs"] == 9
    # t(0.975, 7) times the standard error: residuals of 3 x NOISE, x of deviation sqrt(2 / 3)
    assert law["half"] == pytest.approx(2.3646 * (3 * sum(n * n for n in NOISE) / 7 / 6) ** 0.5, rel=1e-3)
    assert [run["flops"] for run in written["runs"][:9:3]] == pytest.approx([1e6, 1e7, 1e8])
    rows = (steep / "scaling_law.md").read_text().splitlines()
    assert rows[2].startswith("| kunlun | 9 | 2.0 | -0.0200 ±")
    assert rows[3].startswith("| din |")
    assert (steep / "scaling_law.png").stat().st_size
    assert "scaling_law.png" in capsys.readouterr().out


def test_no_line_goes_through_a_u(tmp_path: Path) -> None:
    flops = (1e6, 1e7, 1e8, 1e9, 1e10)
    folder = write(tmp_path / "u", "kunlun", -0.02, flops)
    for size, seed in ((3, 0), (4, 0)):
        file = folder / f"{size}-{seed}" / "results.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"best_ne": 1.2}))
    law = fit(read([folder]))
    assert law is not None
    assert (law.slope, law.until, law.beyond, law.runs) == (pytest.approx(-0.02), pytest.approx(1e8), 2, 9)
    rising = write(tmp_path / "rising", "din", 0.02, flops)
    assert fit(read([rising])) is None
    assert main([str(folder), str(rising)]) == 0
    assert "| din |  |  | no line: one of the two smallest" in (folder / "scaling_law.md").read_text()


def test_what_no_line_can_be_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no finished runs.*runs/sweep-sizes"):
        read([tmp_path / "empty"])
    two = write(tmp_path / "two", "din", -0.01, (1e6, 1e8))
    with pytest.raises(ValueError, match=r"din has 2 sizes; a line needs 3, e.g. --over model.dim=8,32,128"):
        fit(read([two]))
    (two / "0-0" / "results.json").write_text(json.dumps({"tflops_per_s": 1.0, "examples_per_s": 1.0}))
    with pytest.raises(SystemExit):
        main([str(two)])
    assert "has no best_ne; runs need a validation split, e.g. runtime.evals_per_epoch=4" in capsys.readouterr().err
