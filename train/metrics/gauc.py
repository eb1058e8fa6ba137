"""GAUC: AUC within each group (user), averaged over groups by their impressions.

Published figures weight either by impressions or by clicks; here it is impressions (the sum of the weights of a group's
observed rows), as in FuxiCTR and BARS. Groups with labels of one class only have no AUC and are left out of both sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.metrics.auc import segment_auc


def gauc(scores: Tensor, labels: Tensor, weights: Tensor, group: Tensor) -> Tensor:
    """Exact GAUC, 0-d float64, of [N] scores, labels in {0, 1, NaN = not observed}, weights >= 0 and int64 groups.

    NaN when no group has both classes, and when an observed row's score is NaN. Syncs with the host.
    """
    return gauc_means(scores, labels, weights, group)[0]


def gauc_means(scores: Tensor, labels: Tensor, weights: Tensor, group: Tensor) -> Tensor:
    """[2]: GAUC, and the mean of the same groups' AUC in which each counts once; arguments and NaN as in `gauc`."""
    value, weight = segment_auc(scores, labels, weights, group)
    ranked = ~value.isnan()  # a NaN score leaves no group
    weights_of_group = torch.stack([weight * ranked, ranked.double()])
    return (value.nan_to_num() * weights_of_group).sum(1) / weights_of_group.sum(1)
