"""The moving average of weights: what it is after some steps, one of them skipped, and how it is exchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.optim.average import Average


def test_the_average_follows_the_steps_that_were_taken() -> None:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(3, 2)), "b": nn.Parameter(torch.randn(2))}
    average = Average(parameters, 0.25, torch.device("cpu"))
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    taken = 0
    for step in range(8):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter += torch.randn_like(parameter)
        skipped = float(step == 3)
        average.update(torch.tensor(skipped))
        if not skipped:
            decay = min(0.25, taken / (taken + 10))
            expected = {name: decay * expected[name] + (1 - decay) * parameters[name].detach() for name in expected}
            taken += 1
        if step == 0:
            assert torch.equal(average.values["a"], parameters["a"])
    assert average.steps == taken == 7
    for name, value in expected.items():
        torch.testing.assert_close(average.values[name], value)


def test_weights_are_exchanged_in_their_place_and_come_back_after_an_error() -> None:
    weight = nn.Parameter(torch.zeros(2))
    average = Average({"weight": weight}, 0.9, torch.device("cpu"))
    average.values["weight"].fill_(1)
    place = weight.data_ptr()

    def evaluated() -> None:
        with average.applied():
            assert weight.tolist() == [1, 1]
            raise RuntimeError("while evaluating")

    with pytest.raises(RuntimeError, match="while evaluating"):
        evaluated()
    assert weight.tolist() == [0, 0]
    assert average.values["weight"].tolist() == [1, 1]
    assert weight.data_ptr() == place
