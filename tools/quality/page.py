"""Write docs/quality.md from the results stored in docs/quality/: `python -m tools.quality.page`."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tools.quality.check import published
from tools.quality.sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "docs" / "quality"
PAGE = ROOT / "docs" / "quality.md"
METRICS = ("auc", "gauc", "ne")
KEPT_METRICS = ("ne", "auc", "gauc", "calibration")  # of `tools.quality.variants`
BASE = "defaults"  # the arm that others are held against there


INTRODUCTION = """\
# Quality

Written by `python -m tools.quality.page` from `docs/quality/`, which also has every run and the validation NE of every
setting. Means over seeds with the 95 % interval of the mean (Student's t); leads are paired by seed. NE is normalised
entropy: smaller is better, and below 1 beats predicting the training rate. GAUC compares candidates of one user only.
"""
HISTORIES = """\
## GAUC and what a history tells

With ids only, InterFormer has the best AUC and NE on MovieLens-1M and **the lowest GAUC**. The history of a held-out
rating contains the user's earlier held-out ratings. Since a user has a given number of likes, the more came before a
row, the fewer are left. A model that follows the newest ratings learns how the user rates these days, which helps to
order rows of different users and misleads about the order of one user's rows.

The table ranks the same test rows by the same models with one history a user, that before the first of the rows. On
700 users of MovieLens-1M (CPU, float32, batches of 512, 30 events, three validations an epoch) GAUC is then almost
equal, and AUC lower, since the history is older. On the bundled ids InterFormer leads DIN in GAUC; most test users
are new there, so their one history is empty.

On MovieLens-1M, GAUC on validation rises by a further 0.005 to 0.015 after the step of the best NE. A movie's mean
training label alone has GAUC {movie:.4f} on the whole test split, about as much as models with ids only.
"""
SCREENING = """\
## Against memorised ids

Effects of single changes on validation NE, one seed each, on MovieLens-1M as above and on the bundled ratings as ids
and histories (`data=movielens_ids`, three epochs; [raw numbers](quality/screening.json)). {about}

- **Initial rows of deviation 0.01** (`model.table_std`) help InterFormer, DIN and DCNv2 on both data sets and harm
  DLRM. With features, on the bundled data, they cost DIN {din} AUC of `like` at the default rates. Only InterFormer has
  them by default.
- **0.01 added to the mean square** in the norm of looked-up rows (`modules.layers.norms.row_norm`, InterFormer's
  default) helps on both, raises GAUC on MovieLens-1M, and moves the best validation later.
- **No gain on either**: a fourth or a tenth of the tables' rate, fused Adam, decay of tables (1) or of matrices
  (0.3), a separate table for histories.
- **Gains on one**: dropout of layers, embeddings, user ids and histories on the bundled ids;
  `optimizer.ema_decay=0.99` on MovieLens-1M.
"""


def wrapped(text: str) -> str:
    """Markdown paragraphs and lists with lines of up to 120 characters."""
    lines = []
    for piece in re.split(r"\n(?=- |\n)", text):
        lines += [""] if piece.startswith("\n") else []
        words = " ".join(piece.split())
        indent = "  " if words.startswith("- ") else ""
        lines.append(
            textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines) + "\n"


def stored(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a file of results says about itself, and its runs."""
    content = json.loads((STORED / f"{name}.json").read_text())
    return content["about"], content["runs"]


def seeds(runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by name without the seed, which ends it, and by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        name, seed = run["name"].rsplit("/", 1)
        found[name][int(seed)] = run
    return found


def half(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def interval(values: np.ndarray) -> str:
    return f"{values.mean():.4f} ± {half(values):.4f}"


def section_table(section: Section, content: dict[str, Any]) -> list[str]:
    """Markdown: of each row the mean over seeds with the 95 % interval of the mean, the lead, and its setting."""
    remarks = dict(section.remarks)
    found = {row: _values(section, kept["runs"]) for row, kept in content["rows"].items()}
    first = found.get(section.leader)
    heads = ["", *map(_heading, section.metrics)]
    heads += [f"{_heading(section.metrics[0])} lead of {section.leader}"] if first is not None else []
    heads += (
        ["paper's NE"] if remarks else ["setting"] if any(kept["setting"] for kept in content["rows"].values()) else []
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, kept in content["rows"].items():
        cells = [_cell(values) for values in found[row]]
        if first is not None:
            cells.append("" if row == section.leader else _cell(first[0] - found[row][0]))
        cells.append(remarks.get(row, "") if remarks else ", ".join(f"`{each}`" for each in kept["setting"]))
        lines.append(f"| {row} | {' | '.join(cells[: len(heads) - 1])} |")
    if section.published:
        table = published(section.published)
        for row, values in table["rows"].items():
            of = {f"{table['task']}/{metric}": value for metric, value in zip(table["metrics"], values, strict=True)}
            cells = ["" if of.get(metric) is None else f"{of[metric]:.4f}" for metric in section.metrics]
            lines.append(f"| {row}, published | {' | '.join(cells)} |" + " |" * (len(heads) - 1 - len(cells)))
    return lines


def _values(section: Section, runs: list[dict[str, Any]]) -> list[np.ndarray]:
    """Of each metric its values by seed."""
    return [np.array([run["test"].get(metric, np.nan) for run in runs]) for metric in section.metrics]


def _cell(values: np.ndarray) -> str:
    """Mean and interval; how many seeds they are of if some runs lack the metric."""
    known = values[~np.isnan(values)]
    if not len(known):
        return ""
    seeds = "" if len(known) == len(values) else f" ({len(known)} seeds)"
    spread = len(known) > 1 and not np.allclose(known, known[0], rtol=1e-12)
    return (interval(known) if spread else f"{known.mean():.4f}") + seeds


def _heading(metric: str) -> str:
    task, name = metric.removeprefix("again:").split("/")
    shown = name.capitalize() if name.startswith("recall") else name.upper()
    return f"{shown}, one history" if metric.startswith("again:") else f"{task} {shown}"


def sections() -> list[str]:
    """Those of `tools.quality.suite` that have been measured."""
    lines = []
    for name, section in SECTIONS.items():
        file = STORED / "suite" / f"{name}.json"
        if file.exists():
            content = json.loads(file.read_text())
            about = content["about"]
            number = len(about["seeds"])
            where = f"{number} seed{'s' * (number > 1)}, {about['device']}, commit {about['commit']}."
            text = wrapped(f"## {section.title}\n\n{section.text}\n\n{where}")
            lines += [text, *section_table(section, content), ""]
    return lines


def one_history() -> list[str]:
    """Table of runs whose test rows were ranked by their own histories and by one for each user."""
    lines = ["| data | model | seeds | AUC | GAUC | GAUC, one history |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in stored("one_history")[1]:
        groups[run["data"], run["model"]].append(run)
    for (data, model), runs in groups.items():
        values = [np.mean([run[key] for run in runs]) for key in ("auc", "gauc", "gauc_one_history")]
        lines.append(f"| {data} | {model} | {len(runs)} | {' | '.join(f'{value:.4f}' for value in values)} |")
    return lines


def compared(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown of the arms of `tools.quality.variants`, a column for each log."""

    groups = seeds(runs)
    logs = list(dict.fromkeys(name.split("/")[0] for name in groups))
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name, of_seed in groups.items():
        log, model, arm = name.split("/")
        base = groups.get(f"{log}/{model}/{BASE}", {})
        both = sorted(of_seed.keys() & base.keys())
        changes = [100 * (_mean(of_seed[s]["valid"], "ne") / _mean(base[s]["valid"], "ne") - 1) for s in both]
        spread = f" ± {half(np.array(changes)):.1f}" if len(changes) > 1 else ""
        ne = [_mean(each["valid"], "ne") for each in of_seed.values()]
        first = f"{np.mean(ne):.4f}" if arm == BASE or not both else f"{np.mean(changes):+.1f}{spread} %"
        others = (np.mean([_mean(each["valid"], metric) for each in of_seed.values()]) for metric in ("auc", "gauc"))
        rows[model, arm][log] = f"{first}, {', '.join(f'{value:.4f}' for value in others)}"
    lines = [f"| model | arm | {' | '.join(logs)} |", "|" + "---|" * (2 + len(logs))]
    models = list(dict.fromkeys(model for model, _ in rows))
    for (model, arm), cells in sorted(rows.items(), key=lambda row: models.index(row[0][0])):
        lines.append(f"| {model} | {arm} | {' | '.join(cells.get(log, '') for log in logs)} |")
    return lines


def tested(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown of their test AUC and GAUC, means over tasks, a column for each log."""
    groups = seeds(runs)
    logs = list(dict.fromkeys(name.split("/")[0] for name in groups))
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for name, of_seed in groups.items():
        log, _, row = name.partition("/")
        tests = [run["test"] for run in of_seed.values()]
        cells = [_cell(np.array([_mean(test, metric) for test in tests])) for metric in ("auc", "gauc")]
        rows[row][log] = ", ".join(cells)
    lines = [f"| model, arm | {' | '.join(logs)} |", "|" + "---|" * (1 + len(logs))]
    for row, cells in rows.items():
        lines.append(f"| {row.replace('/', ', ')} | {' | '.join(cells.get(log, '') for log in logs)} |")
    return lines


def _mean(values: dict[str, float], metric: str) -> float:
    """Over tasks."""
    return float(np.mean([value for name, value in values.items() if name.split("/")[1] == metric]))


def page() -> str:
    screened, _ = stored("screening")
    groups = seeds(stored("defaults")[1])
    change = np.array(
        [groups["din_before"][s]["test"]["like/auc"] - groups["din"][s]["test"]["like/auc"] for s in groups["din"]]
    )
    read = HISTORIES.format(movie=stored("one_history")[0]["movie_mean_gauc"])
    where = f"{screened['device']}, commit {screened['commit']} with the norms patched in."
    lines = [
        INTRODUCTION,
        *sections(),
        wrapped(read),
        *one_history(),
        "",
        wrapped(SCREENING.format(about=where, din=interval(change))).rstrip(),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
