"""Parts of a model that a run leaves as they are: `optimizer.frozen`, chosen by name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from modules.models.ranking import RankingModel

log = logging.getLogger(__name__)


def freeze(model: RankingModel, globs: Sequence[str]) -> None:
    """Switch off the gradients of parameters that a glob matches, by their name or that of a module which holds them.

    Raises ValueError for a glob that matches nothing, and when only tables are left to train.
    """
    parameters = dict(model.named_parameters())
    for glob in globs:
        chosen = [parameter for name, parameter in parameters.items() if any(fnmatchcase(n, glob) for n in _path(name))]
        if not chosen:
            names = dict.fromkeys(name for parameter in parameters for name in _path(parameter))
            closest = ", ".join(difflib.get_close_matches(glob, names, n=3, cutoff=0.0))
            raise ValueError(f"optimizer.frozen: {glob!r} matches no module and no parameter; closest are {closest}")
        for parameter in chosen:
            parameter.requires_grad_(False)
        elements = sum(parameter.numel() for parameter in chosen)
        log.info("frozen by %s: %s tensors of %s elements", glob, len(chosen), f"{elements:,}")
    tables = {table for each in model.embedding.collections for table in each.parameters()}
    if not any(parameter.requires_grad for parameter in set(parameters.values()) - tables):
        raise ValueError(
            f"optimizer.frozen={list(globs)} leaves nothing to train but tables, and ranks share gradients of dense "
            "parameters; leave a part of the architecture out, e.g. optimizer.frozen=[embedding]"
        )


def _path(parameter: str) -> Iterator[str]:
    """The names of a parameter and of the modules that hold it."""
    parts = parameter.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
