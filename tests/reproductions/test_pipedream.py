"""A pipeline that never flushes: stashed weights, every stage the same updates, groups met in one order."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tests.sync.fleet import run_fleet, settings_of

pytestmark = pytest.mark.slow  # no part of the product


def test_a_backward_pass_sees_the_weights_of_its_forward_pass():
    from tests.reproductions.stash import WeightStash

    weight = torch.nn.Parameter(torch.tensor([2.0]))
    stash = WeightStash([weight])
    x = torch.tensor([3.0], requires_grad=True)
    stash.remember(0)
    out = weight * x
    with torch.no_grad():
        weight.data.fill_(100.0)
    stash.changed()
    stash.remember(1)
    assert len(stash) == 2
    with stash.as_seen_by(0):
        assert weight.item() == 2.0
        out.backward()
    assert x.grad is not None and x.grad.item() == 2.0, "not 100: the gradient of what the forward pass computed"
    assert weight.item() == 100.0 and len(stash) == 1
    with stash.as_seen_by(1):
        assert weight.item() == 100.0
    assert len(stash) == 0


class LinearStage:
    """x -> w x, with the loss 0.5 (y - 1)^2 on the last stage; SGD, weights stashed."""

    def __init__(self, last: bool) -> None:
        from tests.reproductions.stash import WeightStash

        self.last, self.weight = last, torch.nn.Parameter(torch.tensor([0.9]))
        self.optimizer: torch.optim.Optimizer | None = None
        self.stash, self.saved, self.most = WeightStash([self.weight]), {}, 0

    def forward(self, micro_batch: int, received: Any) -> Any:
        x = (torch.ones(1) if received is None else received).requires_grad_()
        self.stash.remember(micro_batch)
        y = self.weight * x
        if self.last:
            y = 0.5 * (y - 1) ** 2
        self.saved[micro_batch] = (x, y)
        self.most = max(self.most, len(self.saved))
        return None if self.last else y

    def backward(self, micro_batch: int, received: Any) -> Any:
        x, y = self.saved.pop(micro_batch)
        with self.stash.as_seen_by(micro_batch):
            y.backward(received)
        return x.grad

    def update(self, micro_batch: int) -> None:
        with self.stash.updating(), torch.no_grad():
            if self.optimizer is not None:
                self.optimizer.step()
            else:
                self.weight.sub_(0.05 * self.weight.grad)
        self.weight.grad = None


def pipeline(
    rank: int, world: int, store: Any, settings: Any, stages: int, steps: int, *, adamw: bool = False
) -> dict[str, Any]:
    import torch.distributed as dist

    from facility.sync.protocol import ReplicaRank
    from tests.reproductions.pipedream import run
    from tests.reproductions.stagewise import connect_stage

    replica, stage = divmod(rank, stages)
    work = LinearStage(last=stage == stages - 1)
    group = dist.ProcessGroupGloo(
        dist.PrefixStore(f"pipe/{replica}", store.clone()), stage, stages, timedelta(seconds=30)
    )
    place = ReplicaRank(replica=replica, replicas=world // stages, position=stage, positions=stages)
    work.optimizer = torch.optim.AdamW([work.weight], lr=0.01) if adamw else None
    sync = connect_stage(
        settings,
        place=place,
        parameters=[work.weight],
        steps=steps,
        store=store,
        optimizer=work.optimizer,
    )
    made = run(work, sync, group, activation=torch.zeros(1))
    sync.finish()
    report = sync.report()
    sync.close()
    return {"made": made, "weight": work.weight.item(), "most": work.most, "report": report}


def by_hand(stages: int, steps: int) -> list[float]:
    """The same schedule worked in one process: stage s has S - s forwards in flight, 1F1B with stashed weights."""
    work = [LinearStage(last=s == stages - 1) for s in range(stages)]
    acts: dict[tuple[int, int], Any] = {}
    grads: dict[tuple[int, int], Any] = {}
    forwards, backwards = [0] * stages, [0] * stages
    while min(backwards) < steps:
        for s in range(stages):
            wants_forward = forwards[s] < steps and forwards[s] - backwards[s] < stages - s
            if wants_forward and (s == 0 or (s, forwards[s]) in acts):
                y = work[s].forward(forwards[s], acts.pop((s, forwards[s]), None))
                if s < stages - 1:
                    acts[s + 1, forwards[s]] = y.detach()
                forwards[s] += 1
            elif backwards[s] < forwards[s] and not wants_forward and (s == stages - 1 or (s, backwards[s]) in grads):
                g = work[s].backward(backwards[s], grads.pop((s, backwards[s]), None))
                if s:
                    grads[s - 1, backwards[s]] = g
                work[s].update(backwards[s])
                backwards[s] += 1
    return [stage.weight.item() for stage in work]


def test_a_single_pipeline_does_what_the_schedule_says():
    results = run_fleet(pipeline, 3, settings_of(), 3, 12)
    assert [r["made"] for r in results] == [12, 12, 12]
    assert [r["most"] for r in results] == [3, 2, 1], "stage s of S holds S - s micro-batches"
    assert [r["weight"] for r in results] == pytest.approx(by_hand(3, 12))


@pytest.mark.parametrize("policy", ["allreduce", "partial_reduce", "adpsgd"])
@pytest.mark.parametrize("adamw", [False, True])
def test_pipelines_synchronise_stage_by_stage(policy: str, adamw: bool):
    results = run_fleet(partial(pipeline, adamw=adamw), 4, settings_of(policy=policy, bound=2), 2, 10)
    assert results[0]["weight"] == results[2]["weight"] and results[1]["weight"] == results[3]["weight"]
    assert results[0]["made"] == results[1]["made"] and results[2]["made"] == results[3]["made"]
    assert results[0]["made"] + results[2]["made"] >= 20
    if policy == "allreduce" and not adamw:  # both pipelines do the same, so their mean is each
        assert [r["weight"] for r in results[:2]] == pytest.approx(by_hand(2, 10))
