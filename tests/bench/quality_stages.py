"""A pipeline of two stages that never flushes, for `sync_quality.py`: half of the Llama each, weights stashed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.sampling import ReplicaOrder
from tests.reproductions.pipedream import run
from tests.reproductions.stagewise import connect_stage
from tests.reproductions.stash import WeightStash

STAGES = 2


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class Half(nn.Module):
    """The first or the second half of a Llama, moved out of the whole one."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        body, middle = model.model, len(model.model.layers) // STAGES
        self.rotary = body.rotary_emb
        self.layers = body.layers[:middle] if stage == 0 else body.layers[middle:]
        self.embed = body.embed_tokens if stage == 0 else None
        self.norm, self.head = (None, None) if stage == 0 else (body.norm, model.lm_head)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = value if self.embed is None else self.embed(value)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotary)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class TrainedStage:
    """What `tests.reproductions.pipedream.run` drives."""

    def __init__(
        self,
        half: Half,
        stage: int,
        replica: int,
        rows: Any,
        rate: Callable[[], float],
        emulation: Emulation,
        seconds: tuple[float, float],
    ) -> None:
        self.half, self.stage, self.replica, self.rows = half, stage, replica, rows
        self.emulation, self.seconds = emulation, seconds
        self.rate = rate
        self.optimizer = torch.optim.AdamW(half.parameters(), lr=0.0)
        self.stash = WeightStash(list(half.parameters()))
        self.saved: dict[int, tuple[Any, torch.Tensor]] = {}

    def sleep(self, draw: int, since: float) -> None:
        """What the emulated pass takes beyond the real one."""
        seconds = self.emulation.duration(self.replica, self.seconds[draw % 2], draw, stage=self.stage)
        sleep_until(since + seconds)

    def forward(self, micro_batch: int, received: Any) -> Any:
        begin = time.monotonic()
        tokens = self.rows(micro_batch)
        value = tokens if received is None else received.requires_grad_()
        self.stash.remember(micro_batch)
        out = self.half(value)
        last = self.stage == STAGES - 1
        if last:
            out = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.saved[micro_batch] = (value, out)
        self.sleep(2 * micro_batch, begin)
        return None if last else out

    def backward(self, micro_batch: int, received: Any) -> Any:
        begin = time.monotonic()
        value, out = self.saved.pop(micro_batch)
        self.optimizer.zero_grad()
        with self.stash.as_seen_by(micro_batch):
            out.backward(received)
        self.sleep(2 * micro_batch + 1, begin)
        return None if self.stage == 0 else value.grad

    def update(self, micro_batch: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate()
        nn.utils.clip_grad_norm_(self.half.parameters(), 1.0)
        with self.stash.updating():
            self.optimizer.step()


class Until:
    """A synchroniser that wants no more after a time; only the first stage is asked."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.end = inner, time.monotonic() + seconds if seconds else float("inf")

    def wants_more(self) -> bool:
        return bool(self.inner.wants_more()) and time.monotonic() < self.end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def train_stages(
    rank: int,
    store: Any,
    job: dict[str, Any],
    model: Any,
    data: Any,
    tag: str,
    *,
    pipelines: int,
    batch: int,
    emulation: Emulation,
    passes: tuple[float, float],
    rate: Callable[[float], float],
) -> dict[str, Any]:
    """Train `model` (in place: the first rank ends with the whole averaged one); seconds and report."""
    replica, stage = divmod(rank, STAGES)
    half = Half(model, stage)
    order = ReplicaOrder(policy="strided", sequences=len(data), replica=replica, replicas=pipelines, seed=job["seed"])
    work = TrainedStage(
        half,
        stage,
        replica,
        lambda m: data[order.take(m * batch, batch)],
        lambda: rate(sync.progress) * sync.step_scale,
        emulation,
        passes,
    )
    pipe = dist.ProcessGroupGloo(
        dist.PrefixStore(f"{tag}/pipe/{replica}", store.clone()), stage, STAGES, timedelta(seconds=60)
    )
    sync = connect_stage(
        SyncSettings(policy=job["policy"], missing_seconds=60.0, **job["options"]),
        place=ReplicaRank(replica=replica, replicas=pipelines, position=stage, positions=STAGES),
        parameters=list(half.parameters()),
        steps=job["steps"],
        store=store,
        optimizer=work.optimizer,
        namespace=tag,
    )
    begin = time.monotonic()
    run(work, Until(sync, job["seconds"]), pipe, activation=torch.zeros(batch, data.shape[1], model.config.hidden_size))
    trained = time.monotonic() - begin
    sync.finish()
    report = sync.report()
    sync.close()
    vector = nn.utils.parameters_to_vector(half.parameters()).detach()
    if rank == 1:
        store.set(f"{tag}/second half", vector.numpy().tobytes())
    if rank == 0:
        other = Half(model, 1)
        nn.utils.vector_to_parameters(
            torch.frombuffer(bytearray(store.get(f"{tag}/second half")), dtype=torch.float32), other.parameters()
        )
    return {"seconds": trained, "report": report}
