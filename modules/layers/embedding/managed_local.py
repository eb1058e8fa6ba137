"""Which id of a managed table has which row, as training left it: `managed` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NO_ID = torch.iinfo(torch.int64).max
SEGMENTS = 1025
"""Places that TorchRec has for the ends of the ranks' parts of a table."""
OF_TRAINING = ("_mch_counts", "_mch_last_access_iter", "_current_iter_tensor")
"""What a managed table has besides in training: by it ids get rows and lose them."""


class LocalRowsOfIds(nn.Module):
    """Rows of ids by the names and the rules of `RowsOfIds`, but no id gets or loses one."""

    _mch_sorted_raw_ids: Tensor  # [rows]; rows without an id have NO_ID
    _mch_remapped_ids_mapping: Tensor  # [rows]: their rows
    _output_segments_tensor: Tensor  # [SEGMENTS]: where the parts of ranks start, the number of rows, and then -1

    def __init__(self, rows: int, ids: int, device: torch.device | str) -> None:
        """`rows` of a table for ids below `ids`, none of which has a row yet."""
        super().__init__()
        self.ids = ids
        segments = torch.tensor([0, rows] + [-1] * (SEGMENTS - 2), device=device)
        self.register_buffer("_output_segments_tensor", segments)
        self.register_buffer("_mch_sorted_raw_ids", torch.full((rows,), NO_ID, device=device))
        self.register_buffer("_mch_remapped_ids_mapping", torch.arange(rows, device=device))
        self.register_load_state_dict_post_hook(_sort)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows [N] int64 of ids [N]: an id without one has the last of the rank that trained its range of ids."""
        places = torch.searchsorted(self._mch_sorted_raw_ids[:-1], ids)
        segments = self._output_segments_tensor
        ranks = (segments >= 0).sum() - 1
        rank = ids // ((self.ids + ranks - 1) // ranks)
        found = self._mch_sorted_raw_ids[places] == ids
        return torch.where(found, self._mch_remapped_ids_mapping[places], segments[rank + 1] - 1)


def _sort(module: LocalRowsOfIds, _: object) -> None:
    """Ranks sort what is theirs, and a checkpoint has one after the other."""
    module._mch_sorted_raw_ids, order = module._mch_sorted_raw_ids.sort(stable=True)
    module._mch_remapped_ids_mapping = module._mch_remapped_ids_mapping[order]
