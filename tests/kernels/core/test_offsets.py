"""Offsets computed from others are made once, and anew where that would not be right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import gdpa, ikbo
from kernels.core import caches
from kernels.core.offsets import derived, narrowed, scaled_offsets


def test_made_once_for_all_layers() -> None:
    offsets, index = torch.tensor([0, 3, 5]), torch.tensor([0, 1])
    assert scaled_offsets(offsets, 1) is offsets
    scaled = scaled_offsets(offsets, 4)
    assert scaled.tolist() == [0, 12, 20]
    assert scaled_offsets(offsets, 4) is scaled
    assert scaled_offsets(offsets, 2).tolist() == [0, 6, 10]
    assert narrowed(offsets).dtype is torch.int32
    assert narrowed(offsets) is narrowed(offsets)
    assert narrowed(narrowed(offsets)) is narrowed(offsets)
    both = derived(lambda: offsets[index], "key", offsets, index)
    assert derived(lambda: offsets[index], "key", offsets, index) is both
    index.add_(1)
    assert derived(lambda: offsets[index], "key", offsets, index).tolist() == [3, 5]
    offsets[2] = 6
    assert scaled_offsets(offsets, 4).tolist() == [0, 12, 24]


def test_no_tensor_of_inference_mode_is_kept() -> None:
    offsets = torch.tensor([0, 3, 5])
    with torch.inference_mode():
        assert scaled_offsets(offsets, 4).is_inference()
    assert not scaled_offsets(offsets, 4).is_inference()


def test_a_compiler_sees_how_they_are_made() -> None:
    offsets = torch.tensor([0, 3, 5])
    compiled = torch.compile(lambda offsets: scaled_offsets(offsets, 4) + 1, backend="aot_eager", fullgraph=True)
    for end in (5, 7):
        offsets[2] = end
        assert compiled(offsets).tolist() == [1, 13, 4 * end + 1]


def _tables_of(offsets: Tensor) -> list[Tensor]:
    return [kept.table for kept in caches._tables[id(offsets)][1].values()]


@pytest.mark.parametrize("learned", [False, True])
def test_gdpa_makes_the_offsets_of_rows_of_one_length_once(learned: bool) -> None:
    offsets = torch.tensor([0, 1, 3])
    jagged, dense, queries = torch.randn(3, 2, 4), torch.randn(2, 5, 2, 4), torch.randn(5, 2, 4)

    def layer() -> Tensor:
        sizes = {"max_q": 5, "max_k": 5, "score_scale": 1.0}
        if learned:
            return gdpa.gdpa(queries, jagged, jagged, None, offsets, **sizes)
        return gdpa.gdpa(jagged, dense, dense, offsets, None, **sizes)

    first = layer()
    (table,) = _tables_of(offsets)
    assert table.tolist() == [0, 5, 10]
    torch.testing.assert_close(layer(), first)
    assert [kept is table for kept in _tables_of(offsets)] == [True]


def test_target_attention_and_merged_rows_make_theirs_once() -> None:
    offsets, k_offsets = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4])
    q, k = torch.randn(3, 2, 2, 4), torch.randn(4, 2, 4)
    for _ in range(2):
        ikbo.target_attention(q, k, k, offsets, k_offsets, max_candidates=2, max_k=2)
    assert [table.tolist() for table in _tables_of(offsets)] == [[0, 2, 6]]
    index, sizes = torch.tensor([0, 0]), {"max_q": 3, "max_k": 2, "score_scale": 1.0}
    for _ in range(2):
        gdpa.gdpa(q[:, 0], k, k, offsets, k_offsets, kv_index=index, **sizes)
    assert [table.tolist() for table in _tables_of(offsets)] == [[0, 2, 6], [0, 3, 3]]
    index.copy_(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="must not decrease"):
        gdpa.gdpa(q[:, 0], k, k, offsets, k_offsets, kv_index=index, **sizes)
