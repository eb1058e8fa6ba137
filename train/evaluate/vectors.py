"""What a trained model knows things by: vectors of requests, and rows of tables. On several ranks, all call these."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import RequestBatch
from modules.models.ranking import RequestVectors
from modules.models.retrieval import RetrievalModel, Vectors
from train.build import Job


def given_vectors(job: Job, batch: RequestBatch) -> Tensor | Vectors:
    """What `arch` gives with `gives_vectors`, by the whole model: its call gathers weights that are sharded."""
    arch = cast(RequestVectors | RetrievalModel, job.arch)
    arch.gives_vectors = True
    try:
        with job.autocast():
            return cast(Tensor | Vectors, job.model(batch))
    finally:
        arch.gives_vectors = False


def request_vectors(job: Job, batch: RequestBatch) -> Tensor:
    """[R, width] float32. `check_request_vectors` says whether a model has them."""
    found = given_vectors(job, batch)
    return (found.queries if isinstance(found, Vectors) else found).float()


def check_request_vectors(job: Job) -> None:
    """ValueError for a model without vectors of requests."""
    arch, name = job.arch, job.config.model.name
    if isinstance(arch, RetrievalModel):
        return
    if not isinstance(arch, RequestVectors):
        raise ValueError(
            f"model.name={name} has no vectors of requests: a model of your own has them as a subclass of "
            "modules.models.ranking.RequestVectors, or of modules.models.retrieval.RetrievalModel"
        )
    if refusal := arch.vectors_refusal():
        raise ValueError(f"model.name={name} has no vectors of requests: {refusal}")


def table_rows(job: Job, table: str, ids: Tensor) -> Tensor:
    """[N, width] float32: what a lookup of the ids [N] int64 finds in a table, before any layer."""
    lookups = list(job.source.spec.lookups())
    feature = next(name for name, own in lookups if own == table)
    counts = [ids.numel() if name == feature else 0 for name, _ in lookups]
    lengths = torch.tensor(counts, device=job.world.device)
    values = ids.to(job.world.device)
    keyed = KeyedJaggedTensor([name for name, _ in lookups], values, lengths=lengths, stride=1, length_per_key=counts)
    return job.ranking_model.embedding.look_up(keyed)[feature].values().float()
