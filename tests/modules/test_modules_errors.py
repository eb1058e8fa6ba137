"""What does not fit a module is an error in that module's words, not in those of an operator behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modules.broadcast import CandidateRows
from modules.layers.attention.gdpa import GDPABlock, GDPAPooling, GDPASelfAttention, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import rotation
from modules.layers.attention.target_attention import SelfAndTargetAttention, TargetAttention
from modules.layers.interaction.dot_cross import DHENLayer, DotInteraction
from modules.layers.interaction.wukong import WukongLayer
from modules.layers.pooling.pma import PMA

DIM, HEADS = 8, 2
OFFSETS, CANDIDATES = torch.tensor([0, 3, 8]), torch.tensor([0, 2, 5])  # rows of 3 and 5; 2 and 3 candidates


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM)


def target(kind: type[torch.nn.Module], candidates: int = 3, length: int = 5, queries: int = 2) -> object:
    layer = kind(DIM, HEADS, queries, max_candidates=candidates, max_length=length)
    return layer(tokens(5, 2), CANDIDATES, tokens(8), OFFSETS)


def interaction(kind: type[torch.nn.Module], num_own: int, **options: int) -> object:
    layer = kind(2, DIM, rank=2, hidden=[4], dropout=0.0, num_request=4, **options)
    return layer(tokens(5, num_own), tokens(2, 4), CandidateRows.of_offsets(CANDIDATES, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: JaggedSelfAttention(DIM, HEADS, max_length=4)(tokens(8), OFFSETS), "more than max_length=4"),
        (lambda: GDPASelfAttention(DIM, HEADS, max_length=4)(tokens(8), OFFSETS), "more than max_length=4"),
        (lambda: GDPAPooling(DIM, HEADS, 2, max_length=4)(tokens(8), OFFSETS), "more than max_length=4"),
        (
            lambda: PersonalizedFFN(DIM, HEADS, 3, 4, max_length=4)(tokens(8), OFFSETS, tokens(2, 3)),
            "more than max_length=4",
        ),
        (
            lambda: PersonalizedFFN(DIM, HEADS, 3, 4, max_length=5)(tokens(8), OFFSETS, tokens(2, 2)),
            r"summary must be \[B, 3, 8\], got \[2, 2, 8\]",
        ),
        (lambda: target(TargetAttention, length=4), "more than max_length=4"),
        (lambda: target(TargetAttention, candidates=2), "more than max_candidates=2"),
        (lambda: target(TargetAttention, queries=3), r"queries must be \[C, num_queries=3, dim\], got \[5, 2, 8\]"),
        (lambda: target(SelfAndTargetAttention, length=4), "more than max_length=4"),
        (lambda: target(SelfAndTargetAttention, candidates=2), "more than max_candidates=2"),
        (lambda: target(SelfAndTargetAttention, queries=3), r"num_queries=3, dim\], got \[5, 2, 8\]"),
        (lambda: interaction(DHENLayer, 2, max_candidates=2), "row 1 has 3 values, more than max_candidates=2"),
        (
            lambda: interaction(WukongLayer, 2, max_candidates=2, num_fmb=2, num_lcb=2),
            "row 1 has 3 values, more than max_candidates=2",
        ),
        (lambda: interaction(DHENLayer, 3, max_candidates=3), r"built for 2 tokens, got a tensor \[5, 3, 8\]"),
        (lambda: DotInteraction(3)(tokens(5, 4)), r"built for 3 tokens, got a tensor \[5, 4, 8\]"),
        (lambda: CandidateRows.of_offsets(CANDIDATES, 6), "offsets end at 5 but there are 6 values"),
        (lambda: CandidateRows.of_offsets(CANDIDATES.float(), 5), "must be .* int32 or int64"),
        (lambda: CandidateRows.of_offsets(torch.tensor([2, 3]), 5), "offsets begin with 2"),
    ],
)
def test_the_error_names_what_the_module_was_given(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


LAYERS = {
    "JaggedSelfAttention": lambda x, q: JaggedSelfAttention(DIM, HEADS, max_length=5)(x, OFFSETS),
    "GDPASelfAttention": lambda x, q: GDPASelfAttention(DIM, HEADS, max_length=5)(x, OFFSETS),
    "GDPABlock": lambda x, q: GDPABlock(GDPASelfAttention(DIM, HEADS, max_length=5))(x, OFFSETS),
    "GDPAPooling": lambda x, q: GDPAPooling(DIM, HEADS, 2, max_length=5)(x, OFFSETS),
    "PersonalizedFFN": lambda x, q: PersonalizedFFN(DIM, HEADS, 3, 4, max_length=5)(x, OFFSETS, tokens(2, 3)),
    "TargetAttention": lambda x, q: TargetAttention(DIM, HEADS, 2, max_candidates=3, max_length=5)(
        q, CANDIDATES, x, OFFSETS
    ),
    "SelfAndTargetAttention": lambda x, q: SelfAndTargetAttention(DIM, HEADS, 2, max_candidates=3, max_length=5)(
        q, CANDIDATES, x, OFFSETS
    ),
    "PMA": lambda x, q: PMA(DIM, HEADS, 2, max_candidates=3, max_length=5)(q, CANDIDATES, x, OFFSETS),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_padded_tokens_and_wrong_dtypes_are_named(layer: str) -> None:
    """They were RuntimeErrors of a product inside, and padded tokens of a fitting number passed for jagged ones."""
    call, queries = LAYERS[layer], tokens(5, 2)
    call(tokens(8), queries)
    for padded in (tokens(2, 4), tokens(2, 5)):  # 8 tokens in all, as the offsets say, and 10
        with pytest.raises(ValueError, match=r"values must be \[N, dim=8\] .* got \[2, \d, 8\]; .*padded_to_jagged"):
            call(padded, queries)
    with pytest.raises(ValueError, match=r"must be \[N, dim=8\] beside their offsets, got \[16, 4\]$"):
        call(tokens(8).view(16, 4), queries)
    with pytest.raises(ValueError, match=r"torch.float64 and the module's|must have one dtype"):
        call(tokens(8).double(), queries)
    with pytest.raises(ValueError, match=r"must be floating, got torch.int64; e.g. values.float\(\)"):
        call(tokens(8).long(), queries)
    with torch.autocast("cpu", torch.bfloat16):
        call(tokens(8).bfloat16(), queries)


def test_queries_of_another_dtype_are_named() -> None:
    for layer in ("TargetAttention", "SelfAndTargetAttention"):
        with pytest.raises(ValueError, match="queries are torch.float64 and the module's weights torch.float32"):
            LAYERS[layer](tokens(8), tokens(5, 2).double())


def test_a_block_takes_its_inputs_by_name() -> None:
    values, angles = tokens(8), rotation(torch.arange(8), DIM // HEADS)
    block = GDPABlock(GDPASelfAttention(DIM, HEADS, max_length=5))
    torch.testing.assert_close(block(values, offsets=OFFSETS, rotation=angles), block(values, OFFSETS, angles))
