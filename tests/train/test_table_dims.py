"""Tables of another width: the tokens are those of the rows' products with the matrix of their table."""

from __future__ import annotations

import re

import pytest
import torch

from modules.layers.embedding.tokens import FeatureEmbedding
from tests.modules.factories import random_batch, random_spec

DIM = 16


def test_tokens_of_narrow_and_wide_tables_are_those_of_projected_rows() -> None:
    torch.manual_seed(0)
    spec, batch = random_spec(), random_batch(random_spec())
    mixed = FeatureEmbedding(spec, DIM, "cpu", {"item": 4, "tag": 32})
    plain = FeatureEmbedding(spec, DIM, "cpu")
    with torch.no_grad():
        tables = {name: table for each in mixed.collections for name, table in each.embeddings.items()}
        assert {name: table.embedding_dim for name, table in tables.items()} == {"user": DIM, "item": 4, "tag": 32}
        for name, table in plain.collection.embeddings.items():
            rows = tables[name].weight
            table.weight.copy_(rows if name == "user" else rows @ mixed.assemble.projections[name].weight.T)
        plain.assemble.load_state_dict(mixed.assemble.state_dict(), strict=False)
    ours, expected = mixed(batch), plain(batch)
    torch.testing.assert_close(ours.request, expected.request)
    torch.testing.assert_close(ours.candidate, expected.candidate)
    for event, sequence in ours.histories.items():
        torch.testing.assert_close(sequence.values, expected.histories[event].values)


def test_tokens_are_as_long_as_those_of_other_tables() -> None:
    torch.manual_seed(0)
    spec = random_spec()
    for width in (4, 256):
        embedding = FeatureEmbedding(spec, 128, "cpu", dict.fromkeys(spec.tables, width))
        values = embedding(random_batch(spec, candidates=[4] * 50)).histories["event0"].values
        assert values.unflatten(1, (2, 128)).norm(dim=-1).mean().item() == pytest.approx(1, abs=0.2)


def test_without_other_widths_no_name_changes() -> None:
    spec = random_spec()
    names = set(FeatureEmbedding(spec, DIM, "cpu").state_dict())
    assert names == set(FeatureEmbedding(spec, DIM, "cpu", {"item": DIM}).state_dict())
    assert not [name for name in names if "further" in name or "projections" in name]


def test_a_table_that_does_not_exist_is_named() -> None:
    message = "model.table_dims names 'items'; the tables are item, tag, user, e.g. +model.table_dims.item=16"
    with pytest.raises(ValueError, match=re.escape(message)):
        FeatureEmbedding(random_spec(), DIM, "cpu", {"items": 8})
