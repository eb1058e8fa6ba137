"""The schema of the configuration's group `data`: what all sources share, then a dataclass for each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from modules.config import Settled, option, refuse


@dataclass
class DataConfig:
    name: str = MISSING
    batch_size: Settled = option(256, least=1)  # requests a rank and step; null: by the size of the data, 32 to 256
    eval_batch_size: int = 0  # the same of an evaluation; 0: batch_size
    num_workers: int = 1  # loader processes a rank; 0 loads in the training process
    prefetch: int = option(4, least=1)  # batches that each worker prepares ahead
    cache_dir: str = ".cache"  # where prepared columns and vocabularies go; relative to the working directory
    # rows of data=events that are prepared in memory; more go through the disk in parts of this size
    rows_at_once: int = option(2_000_000, least=1)
    max_history: int = option(50, least=1)  # newest events kept of each event type
    split: list[float] = field(default_factory=lambda: [0.8, 0.1, 0.1])  # train, valid, test, by time
    request_window: int = 60  # seconds: rows of a user within it from a request's first row are one request
    # rows of one request; more are several requests. null: with `request` as many as it has, else 8 of the window
    max_candidates: Optional[int] = option(None, least=1)  # noqa: UP045
    # vocabulary: saved, built on the training split | hash: into hash_rows rows
    id_map: str = option("vocabulary", choices=["vocabulary", "hash"])
    hash_rows: int = option(100_000, most=2**31 - 1)
    min_count: int = 1  # ids seen fewer times in training map to the unknown row
    oov_rows: int = 0  # rows that such ids, and unseen ones, are hashed into; 0: they share that of missing ids
    # what a malformed row does (skipped rows are counted and named)
    bad_rows: str = option("raise", choices=["raise", "skip"])
    max_skipped: float = 0.1  # share of a file set's rows that `skip` may leave out; more is an error
    negative_rate: float = 1.0  # fraction of the training candidates without a positive label that is trained on
    id_dropout: dict[str, float] = field(default_factory=dict)  # table -> share of its training ids made unknown
    # share of the training requests whose histories are left out
    history_dropout: float = option(0.0, below=1, example=0.1)
    pad_events: int = 0  # fill each event type of a training batch up to a multiple of this, for CUDA graphs; 0: not

    retired: ClassVar[dict[str, Any]] = {"table_min_count": {}, "verify_cache": ...}

    def check_at(self, path: str) -> None:
        parts = self.split
        refuse(
            not 0 < self.negative_rate <= 1,
            f"{path}.negative_rate={self.negative_rate} is a share of the negatives: above 0 and at most 1, e.g. "
            f"{path}.negative_rate=0.1",
        )
        refuse(
            len(parts) != 3 or min(parts) < 0 or parts[0] == 0 or abs(sum(parts) - 1) > 1e-6,
            f"{path}.split={parts} must be three fractions of sum 1, e.g. {path}.split=[0.8,0.1,0.1]",
        )
        refuse(
            self.max_skipped > 1,
            f"{path}.max_skipped={self.max_skipped} is a share of the rows: at most 1, e.g. 0.1",
        )
        refuse(
            self.id_map == "hash" and self.min_count > 1,
            f"{path}.min_count={self.min_count} needs ids to be counted, which {path}.id_map=hash does not do; use "
            f"{path}.id_map=vocabulary or {path}.min_count=1",
        )
        refuse(
            self.oov_rows and (self.id_map == "hash" or self.min_count < 2),
            f"{path}.oov_rows={self.oov_rows} are learned from ids that are rare in training, and {path}.min_count "
            f"must say what is rare: e.g. {path}.id_map=vocabulary {path}.min_count=2, or use {path}.oov_rows=0",
        )

    sizes_run: ClassVar[bool] = False  # the size of its data decides the length of a run whose keys leave it open

    @property
    def is_open(self) -> bool:
        """Whether a run goes on with data that come while it lasts."""
        return False

    @property
    def dated(self) -> bool:
        return True

    def has_real_labels(self, task: str) -> bool:
        """Whether a task's labels are numbers other than 0 and 1."""
        return False

    def leave_out_statistics(self) -> None:
        """Of earlier rows, unless they were asked for: for models whose items have one vector for all requests."""

    def transformed(self) -> dict[str, dict[str, Any]]:
        """How columns are made of others, in plain values."""
        return {}

    def counted(self) -> Any:
        """Which statistics of earlier rows there are."""
        return {}


@dataclass
class MovieLensConfig(DataConfig):
    name: str = "movielens"
    path: str = "builtin"  # builtin: the bundled ml-latest-small; else a folder in an official MovieLens layout


@dataclass
class JoinConfig:
    """A side table with one row for each value of its key: columns that the rows lack come from it."""

    files: list[str] = MISSING
    column: str = MISSING  # column of the rows that refers to it
    key: str | None = None  # its key column; default: the same name


@dataclass
class HistoryConfig:
    """One event type. Its events are the user's earlier rows, or rows of a log, or lists that stand in each row."""

    fields: list[str] = MISSING  # columns of ids, position-aligned; list columns when `lists`
    where: dict[str, Any] = field(default_factory=dict)  # only rows that have this value, or one of these, in a column
    files: list[str] = field(default_factory=list)  # a log of events; absent: the labelled rows themselves
    user: str | None = None  # user and time column of that log; default: the same names
    time: str | None = None
    time_format: str | None = None  # of its times; default: that of the labelled rows
    lists: bool = False  # read list columns of the row, oldest event first
    times: str | None = None  # with lists: list column of the events' times; absent: only their order is known
    # column of the time from which the event is known; default: of rows, that of a label whose column `where` names
    known_at: str | None = None

    def check_at(self, path: str) -> None:
        refuse(not self.fields, f"{path}.fields is empty; name at least one column, e.g. [item_id]")
        refuse(
            self.lists and (self.where or self.files),
            f"{path}.lists reads lists of the row itself; where and files go with lists=false",
        )
        refuse(
            self.times and not self.lists,
            f"{path}.times names a list column and goes with lists=true; a log's time column is `time`",
        )


@dataclass
class TransformConfig:
    """A column made of others, by exactly one of cross, bucketize, log, clip, hash and copy."""

    copy: str | None = None  # ids: those of this column, or its lists, under a name that may have another table
    cross: list[str] = field(default_factory=list)  # ids: combinations of these columns' ids
    bucketize: str | None = None  # ids: the interval between `edges` in which this column's number is
    edges: list[float] = field(default_factory=list)  # rising; an edge belongs to the interval above it
    log: str | None = None  # numbers: sign(x) log(1 + |x|)
    clip: str | None = None  # numbers: at least `least` and at most `most`
    least: float | None = None
    most: float | None = None
    hash: str | None = None  # ids: one of `buckets` by the id's text
    buckets: int = 0

    retired: ClassVar[dict[str, Any]] = {"lookup": None, "table": {}, "default": None}


@dataclass
class VectorConfig:
    """A column of vectors, one a row: a list column of numbers, or text such as [0.5, -1]."""

    width: int = option(MISSING, least=1)  # numbers of each vector
    scale: str = option("standard", choices=["standard", "none"])  # standard: each number by its mean and deviation


@dataclass
class TableVectorsConfig(VectorConfig):
    """An embedding table whose rows are vectors from files, one for each id, scaled by all vectors of the files."""

    files: list[str] = MISSING  # as those of a join
    id: str = MISSING  # their column of ids
    vector: str = MISSING  # their column of vectors
    dtype: str = option("fp32", choices=["fp32", "fp16"])  # of the rows in memory and in checkpoints
    frozen: bool = True  # rows do not learn; false: they are where the table begins


@dataclass
class StatisticConfig:
    """Numbers of the rows, or of a log's entries, that agree in some columns and are strictly before a request."""

    by: list[str] = MISSING  # columns of ids that must be equal
    of: list[str] | None = None  # tasks whose labels are counted; default: all with labels of 0 and 1
    kinds: list[str] = field(default_factory=lambda: ["count", "rate"])  # count, rate, recency (seconds since the last)
    distinct: list[str] = field(default_factory=list)  # columns of which different ids are counted
    log: str | None = None  # event type of data.histories whose files are counted; absent: the labelled rows
    half_life: float = 0.0  # seconds after which a row counts half, in steps of an eighth of it; 0: rows always count 1
    smoothing: float = 20.0  # rows at the rate of all earlier rows that a rate begins with


@dataclass
class EventsConfig(DataConfig):
    name: str = "events"
    batch_size: Settled = option(None, least=1)
    root: str = "."  # folder that relative file names start from
    files: list[str] = MISSING  # Parquet, ORC, Arrow or CSV files, folders, globs
    valid_files: list[str] = field(default_factory=list)  # splits with files of their own; the rest is split by time
    test_files: list[str] = field(default_factory=list)
    # seconds that training waits for further files once those that it knows are used up; 0: it takes no others
    follow_wait: float = 0.0
    follow: list[str] = field(default_factory=list)  # where they appear, as files; none given: where `files` says
    manifest: str | None = None  # with follow_wait, text file that names complete files, one a line; others wait
    csv_separator: str = ","
    csv_quotes: bool | None = None  # of CSV files: true: as RFC 4180 | false: quotes are text | null: as the rows tell
    column_names: list[str] = field(default_factory=list)  # of CSV files of labelled rows without a header line
    joins: list[JoinConfig] = field(default_factory=list)
    labels: dict[str, str] = MISSING  # task -> column of 0, 1 or empty, or compared: "rating >= 4", "event == buy"
    real_labels: list[str] = field(default_factory=list)  # tasks whose column has real numbers, see tasks.TASK.loss
    # last: each user's last request is of the test split, the one before it of validation; of a split with files of its
    # own, the last requests of their users
    split_by: str = option("time", choices=["time", "last"])
    # last, with split_by=last: train on a user's last other request only, whose history holds the rest
    train_requests: str = option("all", choices=["all", "last"])
    weight: str | None = None  # column of each row's weight in loss and metrics, at least 0; absent or empty: 1
    user: str | None = None  # column of the user id; absent: every row is a user of its own
    time: str | None = None  # column of the event time; absent: rows stand in time order, each is a request
    time_format: str = "s"  # s | ms since 1970 | a strptime pattern, e.g. "%y%m%d%H"; timestamp columns need none
    request: str | None = None  # column of the request id; absent: rows of a user within request_window
    request_categorical: list[str] = field(default_factory=list)
    request_list: list[str] = field(default_factory=list)
    request_numeric: list[str] = field(default_factory=list)
    candidate_categorical: list[str] = field(default_factory=list)
    candidate_list: list[str] = field(default_factory=list)
    candidate_numeric: list[str] = field(default_factory=list)
    request_vectors: dict[str, VectorConfig] = field(default_factory=dict)  # column of vectors -> how it is read
    candidate_vectors: dict[str, VectorConfig] = field(default_factory=dict)
    # column that tells a request's vendors (advertisers, shops) apart: a level between the request and its candidates
    vendor: str | None = None
    vendor_categorical: list[str] = field(default_factory=list)  # features of vendors, equal for all their candidates
    vendor_list: list[str] = field(default_factory=list)
    vendor_numeric: list[str] = field(default_factory=list)
    vendor_vectors: dict[str, VectorConfig] = field(default_factory=dict)
    log_numeric: list[str] = field(default_factory=list)  # numeric columns scaled by sign(x) log(1 + |x|) first
    missing_nan: list[str] = field(default_factory=list)  # globs of number, label, weight columns: NaN there is missing
    missing_fill: dict[str, float] = field(default_factory=dict)  # numeric column -> a missing number; default: mean
    missing_indicator: list[str] = field(default_factory=list)  # globs of numeric columns: another is 1 where missing
    list_separator: str = "|"  # of list columns that arrive as text
    table_vectors: dict[str, TableVectorsConfig] = field(default_factory=dict)  # embedding table -> its vectors by id
    transforms: dict[str, TransformConfig] = field(default_factory=dict)  # name of a column -> how it is made of others
    tables: dict[str, str] = field(default_factory=dict)  # column -> embedding table; default: a table of its own name
    vocabulary_of: str | None = None  # run directory whose ids keep their rows and numbers their scale; new ids follow
    new_ids: bool = True  # false, with vocabulary_of: ids that it lacks are unknown; its label rates are kept, too
    histories: dict[str, HistoryConfig] = field(default_factory=dict)  # event type -> where its events come from
    # numbers of the rows before a request. auto: counts and rates by user, by the first columns of candidates, and by
    # both, with time and split_by=time | none | name -> a mapping as StatisticConfig
    statistics: Any = "auto"
    known_at: dict[str, str] = field(default_factory=dict)  # task -> column of the time from which its label is known
    # task -> seconds after a row at which its label is final; labels of younger rows are missing
    matures_after: dict[str, float] = field(default_factory=dict)
    as_of: str | None = None  # labels known or final after this time are missing; absent: the newest time in the files
    # feature that rows have and requests do not, as the position -> its value in validation, test and scoring
    display: dict[str, Any] = field(default_factory=dict)

    sizes_run: ClassVar[bool] = True

    def check_at(self, path: str) -> None:
        super().check_at(path)
        for name, history in self.histories.items():
            key, time = f"{path}.histories.{name}", f"{path}.time must name the time column of the rows"
            refuse(history.times and not self.time, f"{key}.times dates events: {time}")
            refuse(history.files and not self.time, f"{key}.files is a log of timed events: {time}")
            refuse(
                not history.lists and not self.user,
                f"{key} collects a user's earlier events: {path}.user must name the user column",
            )
        kinds = ("categorical", "list", "numeric", "vectors")
        of_vendors = {f"{path}.vendor_{kind}": list(getattr(self, f"vendor_{kind}")) for kind in kinds}
        key, names = next(((key, names) for key, names in of_vendors.items() if names), ("", [""]))
        refuse(
            not self.files,
            f"{path}.files is empty; name the files of labelled rows, e.g. {path}.files=[log.parquet]",
        )
        refuse(
            not self.list_separator,
            f"{path}.list_separator is empty; give the text between items, e.g. {path}.list_separator='|'",
        )
        refuse(not self.labels, f"{path}.labels is empty; name at least one, e.g. labels: {{click: clicked}}")
        refuse(
            self.split_by == "last" and not (self.user and self.time),
            f"{path}.split_by=last holds out each user's last requests: {path}.user and {path}.time must name "
            f"their columns, e.g. {path}.user=session {path}.time=position",
        )
        refuse(
            self.train_requests == "last" and self.split_by != "last",
            f"{path}.train_requests=last goes with {path}.split_by=last, which holds out each user's last ones",
        )
        refuse(
            self.request and not self.user,
            f"{path}.request={self.request} groups rows of one user: {path}.user must name the user column; "
            f"without users, let each request be one, {path}.user={self.request}",
        )
        refuse(
            key and not self.vendor,
            f"{key}={names} are features of vendors: {path}.vendor must name the column that tells vendors apart, "
            f"e.g. {path}.vendor={names[0]}",
        )
        refuse(
            self.vendor and not key,
            f"{path}.vendor={self.vendor} has no feature; name at least one, e.g. "
            f"{path}.vendor_categorical=[{self.vendor}]",
        )

    @property
    def is_open(self) -> bool:
        return self.follow_wait > 0

    @property
    def dated(self) -> bool:
        return self.time is not None

    def has_real_labels(self, task: str) -> bool:
        return task in self.real_labels

    def leave_out_statistics(self) -> None:
        if self.statistics == "auto":
            self.statistics = "none"

    def transformed(self) -> dict[str, dict[str, Any]]:
        # With what earlier versions had behind it: fingerprints of data hold.
        return {name: asdict(each) | each.retired for name, each in self.transforms.items()}

    def counted(self) -> Any:
        return self.statistics


@dataclass
class SyntheticConfig(DataConfig):
    name: str = "synthetic"
    seed: int = 0  # another seed is another population, not another order
    num_requests: int = 1_000_000  # of the training split
    eval_requests: int = 0  # of the valid and of the test split each; 0: a tenth of the training split's
    num_users: int = option(100_000, least=1)
    num_items: int = 100_000
    num_categories: int = option(100, least=1)  # of items; memory of a batch holds requests x categories counts
    event_types: list[str] = field(default_factory=lambda: ["click", "view"])
    mean_history: float = 20.0  # of the log-normal lengths, before truncation at max_history
    history_sigma: float = 1.0
    history_scale: dict[str, float] = field(default_factory=dict)  # event type -> factor of mean_history, max_history
    candidates: int = option(1, least=1)  # per request
    # a copy of its request for each candidate, as without request batches, to compare with; batch_size counts originals
    copy_requests: bool = False
    num_request_features: int = 4  # categorical: the user, then contexts
    num_candidate_features: int = 4  # categorical: the item, its category, then attributes of the item
    # what labels depend on. matches: shares of the history in the candidate's category, which small models learn |
    # network: a random network over all features and histories, of which larger models learn more
    signal: str = option("matches", choices=["matches", "network"])
    tasks: list[str] = field(default_factory=lambda: ["click", "like"])

    retired: ClassVar[dict[str, Any]] = DataConfig.retired | {
        "candidate_jitter": False,
        "num_dense": 8,
        "zipf": 1.05,
    }

    def check_at(self, path: str) -> None:
        super().check_at(path)
        once = list(dict.fromkeys(self.tasks))
        if once != self.tasks:
            raise ValueError(
                f"{path}.tasks={self.tasks} must name each task once, e.g. {path}.tasks=[{','.join(once)}]"
            )


SOURCES = (MovieLensConfig, EventsConfig, SyntheticConfig)
