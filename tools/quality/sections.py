"""The tables that `tools.quality.suite` measures: data, rows, and the settings that each row may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

ONE_REQUEST = ("data.request=request", "data.max_candidates=256")
"""Of MovieLens-1M: what a user has held out as one request, whose history is what was before the first rating of it."""


@dataclass(frozen=True)
class Row:
    """A model or a variant of one."""

    overrides: tuple[str, ...]
    plain: bool = False  # the DIN of tools/quality/plain_din.py
    settings: tuple[tuple[str, ...], ...] = ()  # in place of the section's


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    overrides: tuple[str, ...]
    rows: dict[str, Row]
    metrics: tuple[str, ...]  # columns, as the keys of results
    metric: str  # on validation, chooses between settings
    larger: bool  # whether more of it is better
    settings: tuple[tuple[str, ...], ...] = ((),)  # each row may choose one, by its first seed
    again: tuple[str, ...] = ()  # overrides of a further evaluation of the test split, whose keys start with "again:"
    remarks: tuple[tuple[str, str], ...] = ()  # of rows, in a last column
    leader: str = ""  # the row whose lead in the first metric is a column

    def settings_of(self, row: str) -> tuple[tuple[str, ...], ...]:
        return self.rows[row].settings or self.settings


def grid(**choices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All combinations of values; of "a__b" the key is a.b."""
    keys = [name.replace("__", ".") for name in choices]
    return tuple(
        tuple(f"{key}={value}" for key, value in zip(keys, each, strict=True)) for each in product(*choices.values())
    )


RANKING_MODELS = {name: Row((f"model={name}",)) for name in ("interformer", "kunlun", "wukong", "din", "dcnv2", "dlrm")}
SETTINGS = (
    *grid(optimizer__sparse_lr=("0.02", "0.005"), optimizer__lr=("0.001", "0.0003"), model__table_std=("0.01", "null")),
    *grid(optimizer__sparse_lr=("0.05",), optimizer__lr=("0.003",), model__table_std=("0.01", "null")),
    *grid(optimizer__sparse_lr=("0.1",), optimizer__lr=("0.003",), model__table_std=("0.01",)),
    *grid(optimizer__sparse_lr=("0.05",), optimizer__lr=("0.001",), model__table_std=("0.01",)),
)
PLAIN = Row(
    ("model=din",),
    plain=True,  # one Adam for all: as many settings
    settings=(
        *grid(optimizer__lr=("0.006", "0.003", "0.001", "0.0005", "0.0002"), model__table_std=("0.01", "null")),
        *grid(optimizer__lr=("0.02", "0.01"), model__table_std=("0.01",)),
    ),
)
ML1M_TEXT = """\
Would a user rate a movie 4 or more? `+experiment=ml1m_quality`. Each model has the same eight
settings to choose from by validation NE with seed 0: `optimizer.sparse_lr` 0.02 or 0.005, `optimizer.lr` 0.001 or
0.0003, `model.table_std` 0.01 or 1 / sqrt(width); the plain PyTorch DIN has four rates and both deviations. `GAUC, one
history` ranks all held-out movies of a user by one history, the one before the first of them. InterFormer has the
best AUC and NE. Our DIN is below the plain one, Kunlun is below InterFormer, and with one history all but dlrm rank a
user's movies about equally well, the plain DIN best. Most chose the largest rates, so the search was too narrow: it
has twelve settings now, and what the further four gave is [below](#larger-rates)."""
LOSSES = {
    "softmax, uniform": ("tasks.next={loss: softmax, uniform: 4096}",),
    "softmax, in-batch": ("tasks.next={loss: softmax, uniform: 0, in_batch: 2048}",),
    "softmax, both": ("tasks.next={loss: softmax, uniform: 2048, in_batch: 2048}",),
    "gBCE": ("tasks.next={loss: gbce, uniform: 4096}", "model.score=dot", "model.temperature=1"),
    "BPR": ("tasks.next={loss: bpr, uniform: 64}", "model.score=dot", "model.temperature=1"),
}
COSINES = grid(model__temperature=("0.07", "0.1", "0.15"), optimizer__sparse_lr=("0.002", "0.0005"))
PRODUCTS = grid(model__table_std=("0.1", "0.01", "0.3"), optimizer__sparse_lr=("0.002", "0.0005"))
SESSION_EPOCHS = {"diginetica": 12, "tmall": 30}


def _dropouts(dropouts: tuple[float, ...], rates: tuple[float, ...]) -> tuple[tuple[str, ...], ...]:
    """Each dropout with each rate, which is of the tables as well."""
    return tuple(
        (f"model.dropout={dropout}", f"optimizer.lr={rate}", f"optimizer.sparse_lr={rate}")
        for dropout, rate in product(dropouts, rates)
    )


ABLATIONS = {
    "kunlun": ((), ""),
    "PFFN without GDPA": (("model.pffn=linear",), "0.04 % worse"),
    "PMA instead of HSP": (("model.pooling=pma",), "0.08 % worse"),
    "no SumKronLinear": (("model.kron_terms=1",), "0.03 % worse"),
    "no sliding window": (("model.window=0",), "neutral"),
    "no CompSkip": (("model.comp_skip=false",), "neutral"),
    "one stack for all events": (("model.event_stacks=merged",), "not given"),
}
SCALES = {
    "1/sqrt(d_h) before, 1/tau after (default)": (),
    "1/tau before, 1 after": (
        "model.attention_gdpa.score_scale=0.0185",
        "model.attention_gdpa.out_scale=1",
        "model.pffn_gdpa.score_scale=0.0078125",
        "model.pffn_gdpa.out_scale=1",
    ),
    "1/sqrt(d_h) before, 1/sqrt(tau) after": (
        "model.attention_gdpa.out_scale=0.136",
        "model.pffn_gdpa.out_scale=0.0884",
    ),
    "no GDPA: linear PFFN, softmax": ("model.pffn=linear", "model.sequence_attention=softmax"),
}


def _scales(experiment: str, where: str, tasks: tuple[str, ...]) -> Section:
    return Section(
        title=f"Scales of GDPA on {where}",
        text=f"""\
InterFormer with GDPA as PFFN and attention, `+experiment={experiment}`; no setting is searched
([what the scales are](gdpa.md#the-modules)).""",
        overrides=(f"+experiment={experiment}", "model.pffn=gdpa", "model.sequence_attention=gdpa"),
        rows={name: Row(overrides) for name, overrides in SCALES.items()},
        metrics=tuple(f"{task}/{name}" for task in tasks for name in ("ne", "auc")),
        metric="like/ne",
        larger=False,
    )


def _ml1m() -> Section:
    return Section(
        title="MovieLens-1M, ids only, the same search for each model",
        text=ML1M_TEXT,
        overrides=("+experiment=ml1m_quality",),
        rows={**RANKING_MODELS, "plain PyTorch DIN": PLAIN},
        metrics=("like/auc", "like/gauc", "again:like/gauc", "like/ne"),
        metric="like/ne",
        larger=False,
        settings=SETTINGS,
        again=ONE_REQUEST,
        leader="interformer",
    )


SECTIONS = {
    "ml1m": _ml1m(),
    "ml1m_features": Section(
        title="MovieLens-1M with features",
        text="""\
`+experiment=ml1m_quality data=ml1m_features`: genres, demographics and statistics beside the ids. No setting is
searched: each model has the rates and the deviation of first rows that validated better with ids only. `GAUC, one
history` ranks all held-out movies of a user by one history, the one before the first of them. InterFormer is
the best in every column; Kunlun, which reads the same tokens, does not reach it; our DIN is below
the plain PyTorch one here.""",
        overrides=("+experiment=ml1m_quality", "data=ml1m_features"),
        rows={
            **RANKING_MODELS,
            "wukong": Row(("model=wukong", "optimizer.sparse_lr=0.005")),
            "dlrm": Row(("model=dlrm", "model.table_std=null")),
            "plain PyTorch DIN": Row(("model=din", "optimizer.lr=0.001"), plain=True),
        },
        metrics=("like/auc", "like/gauc", "again:like/gauc", "like/ne"),
        metric="like/ne",
        larger=False,
        again=ONE_REQUEST,
        leader="interformer",
    ),
    "gowalla": Section(
        title="Gowalla, two towers",
        text="""\
Places where a user checks in, among all 40,981 without those of training ([data](data.md#public-sets-prepared)):
`+experiment=gowalla_two_tower`. Each loss has six settings to choose from by validation NDCG@20 with seed 0. Published
(BARS), trained on the validation rows as well: MF-BPR .1627 / .1378, LightGCN .1820 / .1547, UltraGCN .1862 / .1580,
SimpleX .1872 / .1557.""",
        overrides=("+experiment=gowalla_two_tower",),
        rows={
            name: Row(overrides, settings=COSINES if "softmax" in name else PRODUCTS)
            for name, overrides in LOSSES.items()
        },
        metrics=("next/recall@20", "next/ndcg@20"),
        metric="next/ndcg@20",
        larger=True,
    ),
    "sessions": Section(
        title="Sessions of Diginetica and Tmall",
        text="""\
Of each test session the last item among all, seen ones included: `+experiment=sessions_sasrec`, trained without the
newest tenth of the sessions, which chooses between four settings and the epoch ([how this differs from published
tables](next_item.md#sessions-and-amazon)).""",
        overrides=("+experiment=sessions_sasrec",),
        rows={
            f"{data}, {model}": Row((f"model={model}", f"data.root=prepared/{data}", f"runtime.epochs={epochs}"))
            for data, epochs in SESSION_EPOCHS.items()
            for model in ("sasrec", "hstu")
        },
        metrics=("next/hr@20", "next/mrr@20"),
        metric="next/ndcg@20",
        larger=True,
        settings=_dropouts((0.2, 0.5), (0.001, 0.003)),
    ),
    "amazon": Section(
        title="Amazon Beauty",
        text="""\
Each user's last item among all others, `+experiment=amazon_sasrec`; the item before it chooses between four settings
and the epoch ([published rows](next_item.md#sessions-and-amazon)).""",
        overrides=("+experiment=amazon_sasrec",),
        rows={model: Row((f"model={model}",)) for model in ("sasrec", "hstu")},
        metrics=("next/hr@5", "next/ndcg@5", "next/hr@10", "next/ndcg@10"),
        metric="next/ndcg@20",
        larger=True,
        settings=_dropouts((0.3, 0.5), (0.001, 0.002)),
    ),
    "kunlun_ablations": Section(
        title="Ablations of Kunlun on the bundled data",
        text="""\
`+experiment=movielens_quality model=kunlun` and one override each ([what they are](kunlun.md#ablations)); no setting is
searched. The paper's NE is of production data of 70 billion examples; ours is of 34 thousand rows, where its
differences are far below the intervals. Rows that are missing were not run.""",
        overrides=("+experiment=movielens_quality", "model=kunlun"),
        rows={name: Row(overrides) for name, (overrides, _) in ABLATIONS.items()},
        metrics=("like/ne", "like/auc", "love/ne", "love/auc"),
        metric="like/ne",
        larger=False,
        remarks=tuple((name, remark) for name, (_, remark) in ABLATIONS.items()),
    ),
    "gdpa_scales_ml1m": _scales("ml1m_quality", "MovieLens-1M", ("like",)),
    "gdpa_scales_bundled": _scales("movielens_quality", "the bundled data", ("like", "love")),
}
