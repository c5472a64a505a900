"""Laws of what travels in the quality experiment: what SparseLoCo leaves, adapters and the mean of their products."""

from __future__ import annotations

import torch
from torch import nn

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.codecs.sparseloco import kept_of
from tests.bench.federated_lora import Adapted, ProductMean, train_components
from tests.bench.federated_sparseloco import SparseLoCo


def test_what_sparseloco_did_not_send_fades_and_is_sent_later():
    codec, start = SparseLoCo(0.25), [torch.zeros(5000)]
    torch.manual_seed(0)
    first, second = torch.randn(5000), torch.randn(5000)
    sent = codec(3, start, [first])[0]
    assert int(sent.count_nonzero()) == kept_of(4096) + kept_of(904)
    rest = first - sent
    begun = codec.start(3, start)[0]
    assert torch.allclose(begun, 0.25 * rest) and torch.equal(codec.start(4, start)[0], start[0])
    published = SparseLoCo(0.0)
    published(3, start, [first])
    assert torch.equal(published.start(3, start)[0], start[0])
    again = codec(3, start, [begun + second])[0]
    assert torch.allclose(again + codec.kept[3][0], second + 0.95 * rest, atol=1e-6)


def test_an_adapter_changes_nothing_at_first_and_only_its_trained_components_later():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False).requires_grad_(False)
    adapted, inputs = Adapted(layer, 4), torch.randn(3, 6)
    assert torch.equal(adapted(inputs), layer(inputs))
    nn.init.normal_(adapted.b)
    train_components(adapted, 1)
    adapted(inputs).square().sum().backward()
    assert adapted.a.grad is not None and adapted.b.grad is not None
    assert adapted.a.grad[0].any() and not adapted.a.grad[1:].any()
    assert adapted.b.grad[:, 0].any() and not adapted.b.grad[:, 1:].any()


def test_the_mean_of_products_of_one_facility_is_its_product():
    torch.manual_seed(0)
    update = {"0": torch.randn(3, 7), "1": torch.randn(5, 3)}
    base = {name: torch.zeros_like(value) for name, value in update.items()}
    after = ProductMean(AggregationSettings(rule="mean")).step(base, {"a": update, "b": update}, {"a": 1.0, "b": 2.0})
    assert torch.allclose(after["1"] @ after["0"], update["1"] @ update["0"], atol=1e-5)
