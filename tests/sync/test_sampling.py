"""Who sees which sequences: explicit, complete, and a function of one's own position only."""

from __future__ import annotations

import numpy as np
import pytest

from facility.exchange.errors import ConfigurationError
from facility.sync.runtime.sampling import ReplicaOrder


@pytest.mark.parametrize("policy", ["contiguous", "strided"])
def test_shares_are_disjoint_and_together_everything(policy):
    shares = [ReplicaOrder(policy=policy, sequences=23, replica=r, replicas=4, seed=1).share() for r in range(4)]
    assert sorted(np.concatenate(shares)) == list(range(23))
    if policy == "contiguous":
        assert [list(s) == list(range(s[0], s[-1] + 1)) for s in shares] == [True] * 4
    else:
        assert [set(s % 4) for s in shares] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("policy", ["contiguous", "strided", "reshuffled"])
def test_epochs_follow_each_other_whatever_the_size_of_a_step(policy):
    order = ReplicaOrder(policy=policy, sequences=22, replica=1, replicas=4, seed=1)
    size = len(order.share())
    whole = order.take(0, 3 * size)
    for epoch in range(3):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(order.share())
    pieces = [order.take(at, 4) for at in range(0, 3 * size - 3, 4)]
    assert np.array_equal(np.concatenate(pieces), whole[: 4 * len(pieces)])
    assert list(whole[:size]) != list(whole[size : 2 * size]), "every epoch in another order"


def test_reshuffled_replicas_go_through_everything_in_orders_of_their_own():
    first, second = (ReplicaOrder(policy="reshuffled", sequences=50, replica=r, replicas=2, seed=1) for r in range(2))
    assert sorted(first.take(0, 50)) == sorted(second.take(0, 50)) == list(range(50))
    assert list(first.take(0, 50)) != list(second.take(0, 50))


def test_more_replicas_than_sequences_is_refused():
    with pytest.raises(ConfigurationError, match="reshuffled"):
        ReplicaOrder(policy="strided", sequences=3, replica=0, replicas=4, seed=0)
