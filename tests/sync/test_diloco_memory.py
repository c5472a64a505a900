"""DiLoCo's outer step is Algorithm 1's to the last bit, without a further vector as long as the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facility.sync.policies import diloco
from facility.sync.runtime.flat import Flat


class Largest(TorchDispatchMode):
    """The longest tensor that an operation makes anew."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in [result] if isinstance(result, torch.Tensor) else []:
            if one.untyped_storage().data_ptr() not in known:
                self.values = max(self.values, one.numel())
        return result


def test_an_outer_step_works_on_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diloco, "PIECE", 100)
    draw = torch.Generator().manual_seed(0)
    outer, momentum, mean = torch.randn(3, 1050, generator=draw)
    parameter = torch.zeros(1050)
    settings = SimpleNamespace(outer_learning_rate=0.7, outer_momentum=0.9)
    policy: Any = SimpleNamespace(settings=settings, flat=Flat([parameter], torch.device("cpu")))
    policy._outer, policy._momentum = outer.clone(), momentum.clone()
    with Largest() as largest:
        diloco.DiLoCo._step(policy, mean)
    gradient = outer - mean
    expected = momentum * 0.9 + gradient
    assert policy._momentum.equal(expected)
    assert policy._outer.equal(outer - 0.7 * (gradient + 0.9 * expected)) and parameter.equal(policy._outer)
    assert 0 < largest.values <= 100
