"""HSTU as a ranking model: what a layer cuts off, and its keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build
from modules.models.ultra_hstu import UltraHSTU, UltraHSTUConfig
from tests.modules.factories import random_batch, random_spec

# Without what depends on how long rows may be.
CONFIG = UltraHSTUConfig(dim=8, token_dim=8, num_heads=2, head_hidden=[8], position_bias=False, divide_by="length")


@pytest.mark.parametrize("lengths", [(0, 1, 2), (3, 1, 6)])
def test_a_layer_of_the_newest_events_differs_where_there_are_more(lengths: tuple[int, ...]) -> None:
    """Two event types of these lengths; 4 events go on."""
    spec = random_spec()
    batch = random_batch(spec, (2, 0, 3), lengths)
    torch.manual_seed(0)
    tokens = FeatureEmbedding(spec, 8, "cpu")(batch)
    all_events, newest = (
        UltraHSTU(spec, dataclasses.replace(CONFIG, layers=[{}, {"newest": count}], num_layers=2)).eval()
        for count in (0, 4)
    )
    newest.load_state_dict(all_events.state_dict())
    off = (newest(tokens, batch) - all_events(tokens, batch)).abs().max()
    assert off < 1e-6 if max(lengths) < 3 else off > 1e-4  # 4 events of both types together


def test_stacks_of_event_types_are_models_of_one_type_each_side_by_side() -> None:
    own: dict[str, dict[str, Any]] = {"event0": {"num_layers": 2, "window": 1}, "event1": {"layers": [{"newest": 2}]}}
    spec, batch = random_spec(), random_batch(random_spec(), (2, 0, 3), (5, 2, 0))
    torch.manual_seed(0)
    tokens = FeatureEmbedding(spec, 8, "cpu")(batch)
    model = UltraHSTU(spec, dataclasses.replace(CONFIG, event_stacks="own", events=own)).eval()
    assert [len(stack.layers) for stack in model.stacks] == [2, 1]
    model.heads = torch.nn.Identity()  # type: ignore[assignment]
    alone = []
    for event, stack in zip(spec.histories, model.stacks, strict=True):
        of_one = dataclasses.replace(spec, histories=(event,))
        changes: dict[str, Any] = {"num_layers": None, **own[event.name]}
        single = UltraHSTU(of_one, dataclasses.replace(CONFIG, **changes)).eval()
        single.request, single.candidate, single.heads = model.request, model.candidate, model.heads
        single.stacks[0].load_state_dict(stack.state_dict())
        alone.append(single(tokens, batch))
    torch.testing.assert_close(model(tokens, batch), torch.cat(alone, 1))


def test_keys_are_checked() -> None:
    for changes, message in (
        ({"token_dim": 9}, r"model\.token_dim=9 must be a multiple of model\.num_heads=2"),
        ({"prefix": 3}, r"model\.prefix=3 says nothing without a window"),
        ({"window": -1}, r"model\.window=-1 must be at least 0"),
        ({"epsilon": 0.0}, r"model\.epsilon=0\.0 must be above 0"),
        ({"divide_by": "row"}, r"model\.divide_by=row"),
        ({"events": {"event0": {}}}, r"use model\.event_stacks=own"),
        ({"event_stacks": "own", "events": {"event9": {}}}, r"names 'event9'; the event types of the data are event0"),
        ({"event_stacks": "own", "events": {"event0": {"window": -1}}}, r"events\.event0\.window=-1 must be at"),
        ({"event_stacks": "own", "events": {"event0": {"prefix": 1}}}, r"events\.event0: .* nothing without a window"),
        ({"event_stacks": "own", "events": {"event0": {"token_dim": 4}}}, r"events\.event0\.token_dim is no key of a"),
        ({"event_stacks": "own", "events": {"event0": {"num_layers": 3, "layers": [{}]}}}, r"use model\.num_layers=1"),
    ):
        with pytest.raises(ValueError, match=message):
            build(dataclasses.replace(CONFIG, **changes), random_spec())
