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
    value, weight = segment_auc(scores, labels, weights, group)
    invalid = torch.where(labels.isnan(), 0.0, scores).isnan().any()
    weight = torch.where(value.isnan(), 0.0, weight)
    return torch.where(invalid, torch.nan, (value.nan_to_num() * weight).sum() / weight.sum())
