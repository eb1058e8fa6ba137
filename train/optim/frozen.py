"""Parts of a model that a run leaves as they are: `optimizer.frozen`, chosen by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from modules.models.ranking import RankingModel
from train.optim.groups import chosen

log = logging.getLogger(__name__)


def freeze(model: RankingModel, globs: Sequence[str]) -> None:
    """Switch off the gradients of parameters that a glob matches, by their name or that of a module which holds them,
    and of tables of vectors that do not learn.

    Raises ValueError for a glob that matches nothing, and when only tables are left to train.
    """
    parameters = dict(model.named_parameters())
    for glob in globs:
        matched = [parameters[name] for name in chosen(list(parameters), glob, "optimizer.frozen")]
        for parameter in matched:
            parameter.requires_grad_(False)
        elements = sum(parameter.numel() for parameter in matched)
        log.info("frozen by %s: %s tensors of %s elements", glob, len(matched), f"{elements:,}")
    for table, given in model.embedding.assemble.spec.vector_tables.items():
        if given.frozen:
            (name,) = (name for name in parameters if name.endswith(f".embeddings.{table}.weight"))
            parameters[name].requires_grad_(False)
    tables = {table for each in model.embedding.collections for table in each.parameters()}
    if not any(parameter.requires_grad for parameter in set(parameters.values()) - tables):
        raise ValueError(
            f"optimizer.frozen={list(globs)} leaves nothing to train but tables, and ranks share gradients of dense "
            "parameters; leave a part of the architecture out, e.g. optimizer.frozen=[embedding]"
        )
