"""The tables that `tools.quality.suite` measures: data, rows, and the settings that each row may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

ONE_REQUEST = ("data.request=request",)
"""Of MovieLens-1M: what a user has held out as one request, whose history is what was before the first rating of it."""


@dataclass(frozen=True)
class Row:
    """A model or a variant of one."""

    overrides: tuple[str, ...]
    by: str = (
        ""  # plain_din or logistic: trained by that module of tools/quality in place of a model of this repository
    )
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
    published: str = ""  # the table of published.json whose rows follow: whoever has its data trains this section

    def settings_of(self, row: str) -> tuple[tuple[str, ...], ...]:
        return self.rows[row].settings or self.settings


def grid(**choices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All combinations of values; of "a__b" the key is a.b."""
    keys = [name.replace("__", ".") for name in choices]
    return tuple(
        tuple(f"{key}={value}" for key, value in zip(keys, each, strict=True)) for each in product(*choices.values())
    )


RANKING_MODELS = {
    name: Row((f"model={name}",))
    for name in (
        *("interformer", "kunlun", "wukong", "din", "dcnv2", "dlrm"),
        *("rankmixer", "tokenmixer", "hyformer", "mixformer", "onetrans"),
    )
}
SETTINGS = (
    *grid(optimizer__sparse_lr=("0.02", "0.005"), optimizer__lr=("0.001", "0.0003"), model__table_std=("0.01", "null")),
    *grid(optimizer__sparse_lr=("0.05",), optimizer__lr=("0.003",), model__table_std=("0.01", "null")),
    *grid(optimizer__sparse_lr=("0.1",), optimizer__lr=("0.003",), model__table_std=("0.01",)),
    *grid(optimizer__sparse_lr=("0.05",), optimizer__lr=("0.001",), model__table_std=("0.01",)),
)
PLAIN = Row(
    ("model=din",),
    by="plain_din",  # one Adam for all: as many settings
    settings=(
        *grid(optimizer__lr=("0.006", "0.003", "0.001", "0.0005", "0.0002"), model__table_std=("0.01", "null")),
        *grid(optimizer__lr=("0.02", "0.01"), model__table_std=("0.01",)),
    ),
)
ML1M_TEXT = """\
Would a user rate a movie 4 or more? Features are the user's and the movie's ids and the history of movies with
ratings. The last tenth of each user's ratings tests, the tenth before it validates; positions stand for times
([preparation](data.md#public-sets-prepared)). `+experiment=ml1m_quality`: two epochs in batches of 2,048, four
validations an epoch, tested at the best validation NE. Each model chooses one of the same twelve settings of
`optimizer.sparse_lr`, `optimizer.lr` and `model.table_std` by validation NE with seed 0; the plain PyTorch DIN, with
one Adam for all, has twelve others. `GAUC, one history` [ranks](#gauc-and-what-a-history-tells) all held-out movies
of a user by one history. No published table has this protocol.

- **InterFormer leads DIN by no more than the interval**; [with features](#movielens-1m-with-features) by more. Five of
  the eight rows lie within 0.0023 AUC; larger rates alone raise DIN by 0.0078.
- Our DIN is level with the [plain PyTorch one](../tools/quality/plain_din.py). Kunlun is not above InterFormer.
- All models chose larger rates than the defaults ([what to set](recipe.md#which-settings)); 0.1 is the largest tried.
- Where a setting was run twice, validation NE differed by up to 0.0013, more than some choices are apart."""
BUNDLED_TEXT = """\
MovieLens latest-small, split 80/10/10 in time order, so that most test users are new. With 610 users it is a
development set, no benchmark. Tasks: `like`, a rating of 4 or more; `love`, a rating of 5. Every model gets the same
features, histories and budget by `+experiment=movielens_quality`, chooses one of the same four settings by validation
NE of `like` with seed 0, and is tested at its best validation NE. The logistic model reads the user's and the movie's
mean rating so far. InterFormer and DIN are alike in `like`, and InterFormer leads in `love`; Kunlun, Wukong and GEM,
made for many features and long histories of several types, are below both on this small set."""
CHOSEN = {  # on MovieLens-1M with ids only: optimizer.sparse_lr and model.table_std
    "interformer": ("0.05", "0.01"),
    "kunlun": ("0.05", "0.01"),
    "wukong": ("0.05", "0.01"),
    "din": ("0.1", "0.01"),
    "dcnv2": ("0.1", "0.01"),
    "dlrm": ("0.05", "0.01"),
}
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


def _beside_published(data: str, table: str, *metrics: str) -> Section:
    return Section(
        title=f"{table}, beside published rows",
        text="",
        overrides=(f"data={data}", "data.batch_size=8192", "runtime.epochs=2", "runtime.evals_per_epoch=2"),
        rows=RANKING_MODELS,
        metrics=metrics,
        metric="click/ne",
        larger=False,
        settings=grid(optimizer__sparse_lr=("0.02", "0.1"), model__table_std=("0.01", "null")),
        published=table,
    )


SECTIONS = {
    "kuaivideo": _beside_published("kuaivideo", "kuaivideo_x1", "click/gauc", "click/auc", "click/log_loss"),
    "kuairand": _beside_published("kuairand", "kuairand_1k", "click/auc"),
    "ml1m": _ml1m(),
    "ml1m_features": Section(
        title="MovieLens-1M with features",
        text="""\
`+experiment=ml1m_quality data=ml1m_features`: genres, demographics and statistics beside the ids. No setting is
searched: each model has one that validated well with ids only, `optimizer.lr=0.003` and what the table shows.
InterFormer leads every model in AUC by more than the interval, and dcnv2 has the best GAUC. Kunlun does not reach
InterFormer: histories of 200 movies leave its windows and seeds nothing to save.""",
        overrides=("+experiment=ml1m_quality", "data=ml1m_features"),
        rows={
            **{
                name: Row(
                    (f"model={name}", "optimizer.lr=0.003"),
                    settings=((f"optimizer.sparse_lr={rate}", f"model.table_std={deviation}"),),
                )
                for name, (rate, deviation) in CHOSEN.items()
            },
            "plain PyTorch DIN": Row(
                ("model=din",), by="plain_din", settings=(("optimizer.lr=0.006", "model.table_std=null"),)
            ),
        },
        metrics=("like/auc", "like/gauc", "again:like/gauc", "like/ne"),
        metric="like/ne",
        larger=False,
        again=ONE_REQUEST,
        leader="interformer",
    ),
    "bundled": Section(
        title="The bundled data",
        text=BUNDLED_TEXT,
        overrides=("+experiment=movielens_quality",),
        rows={
            **RANKING_MODELS,
            "gem": Row(("model=gem",)),
            "plain PyTorch DIN": Row(
                ("model=din",),
                by="plain_din",
                settings=grid(optimizer__lr=("0.001", "0.006"), model__table_std=("0.01", "null")),
            ),
            "logistic": Row(("model=din",), by="logistic", settings=((),)),
        },
        metrics=tuple(f"{task}/{name}" for task in ("like", "love") for name in ("auc", "gauc", "ne")),
        metric="like/ne",
        larger=False,
        settings=grid(optimizer__sparse_lr=("0.02", "0.1"), model__table_std=("0.01", "null")),
        leader="interformer",
    ),
    "quickstart": Section(
        title="Quickstart",
        text="""\
What `make quickstart` trains, each seed in one process.""",
        overrides=("+experiment=quickstart",),
        rows={"interformer": Row(())},
        metrics=("like/auc", "like/ne", "love/auc", "love/ne"),
        metric="like/ne",
        larger=False,
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
and the epoch ([published rows](next_item.md#sessions-and-amazon)). HSTU has not been run.""",
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
searched. The paper's NE is of 70 billion production examples; ours is of 34 thousand rows, where no row differs from
the first by more than the interval. There is one event type and histories are shorter than the window, so the rows
without a window and with one stack are the same model.""",
        overrides=("+experiment=movielens_quality", "model=kunlun"),
        rows={name: Row(overrides) for name, (overrides, _) in ABLATIONS.items()},
        metrics=("like/ne", "like/auc", "love/ne", "love/auc"),
        metric="like/ne",
        larger=False,
        remarks=tuple((name, remark) for name, (_, remark) in ABLATIONS.items()),
    ),
    "gdpa_scales_ml1m": Section(
        title="Scales of GDPA on MovieLens-1M",
        text="""\
InterFormer with GDPA as PFFN and attention, `+experiment=ml1m_quality`; no setting is searched
([what the scales are](gdpa.md#the-modules)).""",
        overrides=("+experiment=ml1m_quality", "model.pffn=gdpa", "model.sequence_attention=gdpa"),
        rows={name: Row(overrides) for name, overrides in SCALES.items()},
        metrics=("like/ne", "like/auc"),
        metric="like/ne",
        larger=False,
    ),
}
