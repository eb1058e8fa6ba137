"""The screen of variants: its jobs, its table, and that what it patches in is gone afterwards."""

from __future__ import annotations

from pathlib import Path

from modules.layers import norms
from tools.datasets import business_logs
from tools.quality import page, run, variants
from tools.quality.run import configuration


def test_a_job_for_each_log_model_arm_and_seed() -> None:
    found = variants.jobs(list(variants.LOGS), list(variants.ARMS), [], [0, 1], ["data.cache_dir=x"])
    names = [job["name"] for job in found]
    of_shop = [name for name in names if name.startswith("shop/")]
    assert len(set(names)) == len(names)
    assert len(of_shop) == 2 * sum(map(len, variants.ARMS.values()))
    first = [name.split("/")[2] in variants.FIRST for name in of_shop]
    assert first == sorted(first, reverse=True)
    assert of_shop[sum(first)].endswith("/0")
    (job,) = variants.jobs(["ids"], ["din"], ["id dropout"], [3], [])
    config = configuration(job["overrides"])
    assert config.data.id_dropout == {"userId": 0.1, "movieId": 0.1}
    assert (config.model.name, config.runtime.seed) == ("din", 3)


def test_what_is_patched_in_trains(tmp_path: Path) -> None:
    """All of it together, on a log of a thousand impressions."""
    business_logs.main(["news", "--to", str(tmp_path / "log"), "--impressions", "1000"])
    small = [f"data.root={tmp_path}/log", f"data.cache_dir={tmp_path}/cache", "data.batch_size=32"]
    words = "tracking.tags=[grouped,bent,flat,units,restart]"
    (job,) = variants.jobs(["news"], ["interformer"], [page.BASE], [0], [*small, "data.max_history=3", words])
    assert set(run.train(job, tmp_path / "run")["valid"]) >= {"click/ne", "read/ne"}


def test_patches_end() -> None:
    (job,) = variants.jobs(["shop"], ["interformer"], ["quiet 0.5"], [0], [])
    with variants.patched(configuration(job["overrides"])):
        assert norms.QUIET == 0.5
    assert norms.QUIET == 0.1


def test_changes_are_paired_by_seed() -> None:
    def run(arm: str, seed: int, ne: float) -> dict:
        return {
            "name": f"shop/din/{arm}/{seed}",
            "valid": {"a/ne": ne - 0.1, "b/ne": ne + 0.1, "a/auc": 0.6, "a/gauc": 0.5},
        }

    runs = [run(page.BASE, 0, 0.5), run(page.BASE, 1, 1.0), run("dropout", 0, 0.51), run("dropout", 1, 1.02)]
    _, _, base, other = page.compared(runs)
    assert base == f"| din | {page.BASE} | 0.7500, 0.6000, 0.5000 |"
    assert other == "| din | dropout | +2.0 ± 0.0 %, 0.6000, 0.5000 |"
