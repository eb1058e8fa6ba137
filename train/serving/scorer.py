"""Scores requests with an export: `Scorer(folder)(batch)`."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.pt2_archive._package import AOTICompiledModel
from torch.fx import GraphModule

from modules.batch import FeatureSpec, RequestBatch
from modules.layers.embedding.tokens import Tokens
from modules.loss import TaskLosses
from modules.models.scoring import IN_PROGRAM, Sequences, VendorInputs, scoring_inputs, vendor_inputs
from modules.pretrained import PretrainedModel, is_importable, load_embedding, read_description
from train.config.places import name_here
from train.process import saved
from train.process.files import faults
from train.serving.user_side import Halves, UserSides
from train.speedup.replay import Replay

ABOUT = "export.json"
PROGRAM = "model.pt2"
FIELDS = {
    "operators": list[str], "program": str | None, "dtype": str, "device": str, "compiled": bool,
    "tasks": dict[str, dict[str, Any]],
}  # fmt: skip
LATER = {
    "eager": str | None, "data_fingerprint": str | None, "checkpoint": str | None, "overrides": list[str],
    "files": dict,
}  # fmt: skip
OPERATORS = ("kernels", "modules")
"""Packages whose modules an export may name."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
SMALLEST = 16
"""Candidates that a request is filled up to at least, so that graphs serve many numbers of them."""


class Gate:
    """Many may pass at once, or one with the door closed, who waits for those inside and lets nobody in.

    Who is inside may pass again, and does not wait.
    """

    def __init__(self) -> None:
        self._condition, self._of_thread = threading.Condition(), threading.local()
        self._inside, self._closed = 0, False

    @contextmanager
    def passing(self) -> Iterator[None]:
        if getattr(self._of_thread, "inside", False):
            yield
            return
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._inside += 1
        self._of_thread.inside = True
        try:
            yield
        finally:
            self._of_thread.inside = False
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._closed = True
            self._condition.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()


class Scorer:
    """Scores the candidates of requests, from as many threads as you like.

    A batch of one request goes through the exported program, which needs no code of the model. Several requests, and
    models that could not be traced, go through the model in eager PyTorch, all requests in one pass; if its class is
    not imported (a model of your own), programs take one request after another.

    On a GPU a program is replayed by CUDA graphs: one for each number of candidates, rounded up to a power of two, and
    each number of events, captured at the third such request. Only the first 16 of these have graphs; others are
    launched from the host. If histories are cut to one length, there are few. Threads wait for each other there; on a
    CPU they do not.

    ValueError when `folder` was not written by `train.commands.export`. `model.pt2` is a program, or a library: as with
    any other, load only one that you trust. Nothing else in the folder can run code.
    """

    def __init__(self, folder: Path | str, user_side_bytes: int = 0) -> None:
        """With `user_side_bytes`, what is computed of requests without their candidates is kept, up to so many, for
        calls of one request in host memory that ask again; ValueError where that cannot be."""
        folder = Path(folder)
        about = read_about(folder)
        for fault in faults(folder, about.get("files", {})):  # exports of earlier versions have none
            raise ValueError(f"{folder} is damaged ({fault}); export the model anew")
        _import_operators(about["operators"])
        config, self.spec = read_description(folder)
        self.device = torch.device(about["device"])
        self.max_candidates = self.spec.max_candidates
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{folder} was exported for a GPU, and there is none; export it with runtime.device=cpu")
        self.dtype = DTYPES[about["dtype"]]
        self.losses = _losses(about["tasks"], self.spec, folder / ABOUT)
        self.data_fingerprint: str | None = about.get("data_fingerprint")
        self.gate = Gate()
        self._model: PretrainedModel | None = None
        if about["program"] and not is_importable(config):
            self.embedding = load_embedding(folder)
        else:
            self._model = PretrainedModel.from_pretrained(folder)
            self.embedding = self._model.local_embedding
        if self.device.type == "cuda":  # on a CPU they stay on the disk
            self.embedding.join(self.device)
            (self._model or self.embedding).to(self.device)
        self._program: Replayed | None = None
        self._loaded: Callable[..., Tensor] | None = None
        if about["program"]:
            try:
                self._loaded = load_compiled(folder) if about["compiled"] else _load_program(folder / PROGRAM)
            except (OSError, RuntimeError, zipfile.BadZipFile) as error:
                said = f"compiled={about['compiled']}, operators={about['operators']}"
                why = str(error).partition("\n")[0]
                raise ValueError(f"{PROGRAM} is not what {folder / ABOUT} says ({said}): {why}") from error
            self._program = Replayed(self._loaded, self.spec, self.device)
        self._lock = threading.Lock()
        self.user_sides: UserSides | None = None
        if user_side_bytes:
            self._halves = self._taken_apart(folder)
            self.user_sides = UserSides(user_side_bytes, by_age=self._halves.by_age)

    def _taken_apart(self, folder: Path) -> Halves:
        reason = "it is served in eager PyTorch" if self._loaded is None else "it is compiled: export compile=false"
        if self.spec.num_vendor_tokens:
            reason = "it has vendors"
        elif isinstance(self._loaded, GraphModule):
            try:
                return Halves(self._loaded, len(self.spec.histories), self.device)
            except ValueError as error:
                reason = str(error)
        raise ValueError(f"no user sides are kept of {folder} ({reason}); use user_side_bytes=0")

    @property
    def traced(self) -> bool:
        """Whether requests go through a program, and not through the model in eager PyTorch."""
        return self._program is not None

    @torch.no_grad()
    def __call__(self, batch: RequestBatch) -> Tensor:
        """Predictions [C, outputs] of the candidates of all requests, probabilities of binary tasks; a task of several
        classes has a column for each.

        ValueError for what `check` refuses.
        """
        self.check(batch)
        if batch.num_candidates == 0:
            return torch.zeros(0, self.spec.num_outputs, device=self.device)
        key = None
        if self.user_sides is not None and batch.num_requests == 1 and batch.row.device.type == "cpu":
            key = self.user_sides.key(batch)
        if batch.row.device.type != self.device.type:
            for features in batch.sparse:
                features.length_per_key()  # remembered: after the move, it would be read from the device
            batch = batch.to(self.device)
        with self.gate.passing(), self._alone():
            if key is not None:
                return self.losses.predict(self._by_halves(key, batch))
            return self.losses.predict(self._logits(self.embedding(batch), batch))

    def check(self, batch: RequestBatch) -> None:
        """ValueError for too many candidates or events of a request, and, of a batch on the host, for ids that no row
        has and numbers that are not finite; one that is on the GPU already is not read back."""
        most = _most_candidates(batch)
        if most > self.max_candidates:
            raise ValueError(
                f"a request has 0 to {self.max_candidates} candidates here, got {most}; score fewer at once, or export "
                f"with max_candidates={most}"
            )
        if batch.row.device.type == "cpu":
            _refuse_not_finite(batch, self.spec)
            _refuse_unknown_ids(batch, self.spec)
        self._refuse_long(batch)

    def _by_halves(self, key: bytes, batch: RequestBatch) -> Tensor:
        assert self.user_sides is not None
        kept = self.user_sides.get(key)
        if kept is None:
            tokens = self.embedding(batch)
            request, candidate, offsets, histories = scoring_inputs(tokens, batch.candidate_offsets)
            kept = self._halves.user(request, [part for event in self.spec.histories for part in histories[event.name]])
            self.user_sides.put(key, kept)
        else:
            candidate, offsets = self.embedding.candidates(batch), batch.candidate_offsets
        count = candidate.shape[0]
        if self.device.type == "cuda":
            candidate, offsets = _rounded_up(candidate, self.max_candidates)
        return self._halves.rest(kept, candidate, offsets)[:count]

    def weights(self) -> dict[str, list[Tensor]]:
        """Those that calls read, in place, by their names in training.

        ValueError for a compiled program, which has the small ones in its code, where nothing replaces them.
        """
        if isinstance(self._loaded, AOTICompiledModel):
            raise ValueError(
                "the weights of a compiled program cannot be changed; export with compile=false, which is served by "
                "CUDA graphs as well"
            )
        found: dict[str, dict[int, Tensor]] = {}
        parts = (("", "embedding.", self.embedding), ("", "", self._model), (IN_PROGRAM, "", self._loaded))
        for of_part, own, module in parts:
            if isinstance(module, nn.Module):
                for name, tensor in module.state_dict().items():
                    found.setdefault(own + name.removeprefix(of_part), {})[tensor.data_ptr()] = tensor
        return {name: [*tensors.values()] for name, tensors in found.items()}

    def _alone(self) -> AbstractContextManager[object]:
        """Graphs, and the compiled model, have one set of inputs and results."""
        return self._lock if self._program is not None and self.device.type == "cuda" else nullcontext()

    def _logits(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        if self._model is not None and (self._program is None or batch.num_requests > 1):
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
                return self._model.arch(tokens, batch).float()
        whole = (tokens, batch.candidate_offsets, vendor_inputs(tokens, batch))
        parts = [whole] if batch.num_requests == 1 else each_request(tokens, batch)
        return torch.cat([self._of_one(*part) for part in parts if part[0].candidate.shape[0]])

    def _of_one(self, tokens: Tokens, candidate_offsets: Tensor, vendors: tuple[VendorInputs, ...] = ()) -> Tensor:
        assert self._program is not None
        request, candidate, offsets, histories = scoring_inputs(tokens, candidate_offsets)
        count = candidate.shape[0]
        if self.device.type == "cuda":
            candidate, offsets = _rounded_up(candidate, self.max_candidates)
            vendors = _given_to_last(candidate.shape[0], vendors)
        return self._program(request, candidate, offsets, histories, *vendors)[:count]

    def _refuse_long(self, batch: RequestBatch) -> None:
        # The events of one request are counted on the host; lengths that lie on a GPU would have to be read.
        times = batch.history_times
        if batch.num_requests == 1:
            longest = times.length_per_key()
        else:
            longest = times.lengths().view(-1, batch.num_requests).amax(1).tolist() if times.keys() else []
        for event, length in zip(self.spec.histories, longest, strict=True):
            if length > event.max_length:
                raise ValueError(
                    f"a request has {length} events of type {event.name!r}, more than the {event.max_length} that "
                    "were exported; keep the newest ones, or train with a larger data.max_history"
                )


def read_about(folder: Path) -> dict[str, Any]:
    """`export.json` of a folder. ValueError when it is not there, or for a field that no export has so."""
    path = folder / ABOUT
    try:
        about = saved.fields(path.read_bytes(), path, FIELDS, LATER)
        saved.check_sums(about.get("files", {}), path)
        for name, known in (("device", DEVICES), ("dtype", tuple(DTYPES)), ("program", (None, PROGRAM))):
            if about[name] not in known:
                raise ValueError(f"{path} is damaged ({name}={about[name]!r} is none of {known})")
    except OSError as error:
        raise ValueError(f"{folder} holds no exported model ({error}); write one with train.commands.export") from error
    except ValueError as error:
        raise ValueError(f"{error}; export the model anew") from None
    return about


def _losses(tasks: dict[str, dict[str, Any]], spec: FeatureSpec, path: Path) -> TaskLosses:
    """ValueError, which names the task, for losses that are none, or not of this model, and for those of other code."""
    if own := [name for name, chosen in tasks.items() if "." in str(chosen.get("loss"))]:
        loss = f"tasks.{own[0]}.loss={tasks[own[0]]['loss']}"
        raise ValueError(f"{path} has {loss}, which no export has: scoring imports no such code")
    try:
        losses = TaskLosses(tasks, spec.tasks)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the model anew") from None
    if sum(losses.outputs) != spec.num_outputs:
        raise ValueError(f"{path} is damaged (tasks have {losses.outputs} outputs, the model {spec.num_outputs})")
    return losses


def each_request(tokens: Tokens, batch: RequestBatch) -> list[tuple[Tokens, Tensor, tuple[VendorInputs, ...]]]:
    """The tokens of each request of a batch, the offsets of its candidates, and what there is of its vendors."""
    ends = batch.candidate_offsets.tolist()
    vendor_ends = [] if batch.vendors is None else batch.vendors.offsets.tolist()
    event_ends = {name: sequence.offsets.tolist() for name, sequence in tokens.histories.items()}
    parts = []
    for index, (first, end) in enumerate(pairwise(ends)):
        histories = {
            name: sequence.rows(event_ends[name][index], event_ends[name][index + 1])
            for name, sequence in tokens.histories.items()
        }
        one = Tokens(tokens.request[index : index + 1], tokens.candidate[first:end], histories)
        vendors: tuple[VendorInputs, ...] = ()
        if batch.vendors is not None and tokens.vendor is not None:
            begin, stop = vendor_ends[index : index + 2]
            of_vendors = batch.vendors.candidate_offsets[begin : stop + 1] - first
            vendors = ((tokens.vendor[begin:stop], of_vendors.new_tensor([0, stop - begin]), of_vendors),)
        parts.append((one, batch.candidate_offsets.new_tensor([0, end - first]), vendors))
    return parts


def _most_candidates(batch: RequestBatch) -> int:
    """Of one request."""
    return batch.num_candidates if batch.num_requests == 1 else max(batch.candidate_offsets.diff().tolist(), default=0)


def _import_operators(modules: list[str]) -> None:
    """Import the modules that define an export's operators. ValueError for one that is not of this project.

    Otherwise an export could name any module. One that has been imported already may define operators of your own.
    """
    for name in modules:
        if name.removeprefix("gemsmith.").partition(".")[0] in OPERATORS:
            try:
                importlib.import_module(name_here(name))
            except ImportError as error:
                raise ValueError(f"{ABOUT} names operators of another version ({error}); export anew") from None
        elif name not in sys.modules:
            raise ValueError(
                f"the export needs operators of {name!r}, which is none of {', '.join(f'{p}.*' for p in OPERATORS)}; "
                "if you trust it, import it before the Scorer is made"
            )


def _refuse_not_finite(batch: RequestBatch, spec: FeatureSpec) -> None:
    sides = [
        ("request", spec.request_columns, batch.request_dense),
        ("candidate", spec.candidate_columns, batch.candidate_dense),
    ]
    if batch.vendors is not None:
        sides.append(("vendor", spec.vendor_columns, batch.vendors.dense))
    for whose, names, values in sides:
        finite = values.isfinite()
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            raise ValueError(
                f"{whose} {row} has {names[column]}={values[row, column].item()}; numbers must be finite. Those of a "
                "batch are scaled, and a missing one is 0, as train.data.reader makes them"
            )


def _refuse_unknown_ids(batch: RequestBatch, spec: FeatureSpec) -> None:
    lookups = iter(spec.lookups())
    for features in batch.sparse:
        asked = list(islice(lookups, len(features.keys())))
        rows = [spec.tables[table] for _, table in asked]
        sizes = torch.tensor([rows, features.length_per_key()], dtype=torch.int64)  # there may be no features
        ids = features.values()
        outside = (ids < 0) | (ids >= torch.repeat_interleave(*sizes, output_size=len(ids)))
        if outside.any():
            first = int(outside.nonzero()[0])
            name, table = asked[int(torch.searchsorted(sizes[1].cumsum(0), first, right=True))]
            raise ValueError(
                f"{name} has the id {int(ids[first])}; table {table!r} has rows 0 to {spec.tables[table] - 1}"
            )


def _load_program(path: Path) -> Callable[..., Tensor]:
    """The exported program, without unpickling more than tensors.

    `torch.export.load` unpickles sample inputs, and constants that are no tensors: ValueError for a file with these.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "/constants/" in name and name.rpartition("/")[2].startswith(("custom_obj", "opaque_obj")):
                raise ValueError(f"{path} holds {name}, an object that is no tensor; write the export anew")
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"  # torch.load then reads nothing but tensors, whatever its caller asks for
    try:
        return torch.export.load(path).module()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds something else than tensors and a program; write the export anew") from error
    finally:
        del os.environ[WEIGHTS_ONLY]
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def load_compiled(folder: Path) -> AOTICompiledModel:
    # The loader that C++ servers use. `aoti_load_package` also compiles and runs a program for each kind of vector
    # instructions of the host, to warn if the export was made on another host, which can take minutes. The runner does
    # without the events by which threads could share it: a capture does not allow them.
    return AOTICompiledModel(torch._C._aoti.AOTIModelPackageLoader(str(folder / "model.pt2"), "model", True, 1, -1))


def _rounded_up(candidate: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Candidates up to the next power of two, at most `most`, and the offsets that make them all the request's."""
    size = min(most, max(SMALLEST, 1 << (candidate.shape[0] - 1).bit_length()))
    rest = candidate.new_zeros(size - candidate.shape[0], *candidate.shape[1:])
    return torch.cat([candidate, rest]), torch.arange(2, device=candidate.device) * size


def _given_to_last(size: int, vendors: tuple[VendorInputs, ...]) -> tuple[VendorInputs, ...]:
    """The vendors of `size` candidates, of which the last ones are the last vendor's."""
    return tuple((*parts, nn.functional.pad(ends[:-1], (0, 1), value=size)) for *parts, ends in vendors)


class Replayed:
    """`arch` on `scoring_inputs`; on a GPU with a graph for each shape that recurs, see `Replay`."""

    def __init__(self, arch: Callable[..., Tensor], spec: FeatureSpec, device: torch.device) -> None:
        self._arch = arch
        self._names = [event.name for event in spec.histories]
        self._replay = Replay(self._flat, device.type == "cuda")

    def __call__(
        self, request: Tensor, candidate: Tensor, offsets: Tensor, histories: Sequences, vendors: VendorInputs = ()
    ) -> Tensor:
        parts = (part for name in self._names for part in histories[name])
        return self._replay(request, candidate, offsets, *parts, *vendors)

    def _flat(self, request: Tensor, candidate: Tensor, offsets: Tensor, *parts: Tensor) -> Tensor:
        histories = {name: parts[3 * i : 3 * i + 3] for i, name in enumerate(self._names)}
        vendors = parts[3 * len(self._names) :]
        return self._arch(request, candidate, offsets, histories, *([vendors] if vendors else []))
