"""Training losses: each task names its own, averaged over what was observed on all ranks."""

from modules.loss.means import global_mean, ranking_loss, shares_of_tasks
from modules.loss.tasks import LOSSES, NEXT_ITEM, TaskLosses, binary_only, task_loss

__all__ = [
    "LOSSES",
    "NEXT_ITEM",
    "TaskLosses",
    "binary_only",
    "global_mean",
    "ranking_loss",
    "shares_of_tasks",
    "task_loss",
]
