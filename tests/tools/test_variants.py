"""The screen of variants: its jobs and its tables."""

from __future__ import annotations

from tools.quality import page, variants
from tools.quality.run import configuration


def test_a_job_for_each_log_model_arm_and_seed() -> None:
    found = variants.jobs(list(variants.LOGS), list(variants.ARMS), [], [0, 1], ["data.cache_dir=x"])
    names = [job["name"] for job in found]
    of_shop = [name for name in names if name.startswith("shop/")]
    assert len(set(names)) == len(names)
    assert len(of_shop) == 2 * sum(map(len, variants.ARMS.values()))
    assert [name[-1] for name in of_shop] == sorted(name[-1] for name in of_shop)
    (job,) = variants.jobs(["ids"], ["interformer"], ["no plain head"], [3], [])
    config = configuration(job["overrides"])
    assert (config.model.name, config.model.plain_head, config.runtime.seed) == ("interformer", False, 3)


def test_changes_are_paired_by_seed() -> None:
    def run(arm: str, seed: int, ne: float) -> dict:
        return {
            "name": f"shop/din/{arm}/{seed}",
            "valid": {"a/ne": ne - 0.1, "b/ne": ne + 0.1, "a/auc": 0.6, "a/gauc": 0.5},
            "test": {"a/auc": 0.5, "b/auc": 0.7, "a/gauc": 0.5},
        }

    runs = [run(page.BASE, 0, 0.5), run(page.BASE, 1, 1.0), run("dropout", 0, 0.51), run("dropout", 1, 1.02)]
    _, _, base, other = page.compared(runs)
    assert base == f"| din | {page.BASE} | 0.7500, 0.6000, 0.5000 |"
    assert other == "| din | dropout | +2.0 ± 0.0 %, 0.6000, 0.5000 |"
    assert page.tested(runs)[2] == f"| din, {page.BASE} | 0.6000, 0.5000 |"
