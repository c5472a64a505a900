"""Bounds on the disk a federation needs, at the coordinator and at a facility, whatever the number of rounds.

They count weights; manifests, logs and reports take some kilobytes more. What is kept when, and what is swept
when: `coordinator.archive.rounds.Archive.prune`, `coordinator.archive.sweep`, `facility.rounds.sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import split_rule
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.settings import SendingSettings
from coordinator.memory.figures import WALK_BYTES, ModelFigures, moments_bytes
from coordinator.preflight.row import size
from facility.exchange.messages.settings import TrainingSettings

IN_FLIGHT = "updates on their way"
"""The part of a coordinator's bound that lies in its work directory; the others lie in the archive."""
MASTER_BYTES = 4
"""Of a parameter in float32."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A bound in bytes, by what takes the room."""

    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    def without(self, *names: str) -> Disk:
        return Disk(parts={name: amount for name, amount in self.parts.items() if name not in names})

    def __str__(self) -> str:
        listed = ", ".join(f"{what} {size(amount)}" for what, amount in self.parts.items() if amount)
        return f"{size(self.bytes)} ({listed})"


def facility_disk(model: ModelFigures, training: TrainingSettings, sending: str = "full") -> Disk:
    """Two models (this round's, and the next one arriving), one update, and the state as a round ends.

    As a round ends the state before it and the new one are there: two times AdamW's moments, with the walks where
    drift is corrected (and a third time after an update that was not used); beside them until the update is complete
    the checkpoint in the middle of the round (master weights and moments) of a job that ran out of time, and, where
    jobs are told when to save, the older one that it takes the place of. `sending`: the encoding of received models: as
    one arrives, its message and the two models that are kept are there beside it.
    """
    trained = model.trained(training)
    state = moments_bytes(model, training)
    walk = WALK_BYTES if training.drift_correction else 0
    moments = state if training.keep_optimizer else 0
    paused = state + (MASTER_BYTES - walk) * trained
    again = paused if training.limits.seconds or training.limits.save_every else 0
    moments_sent = model.moments(training)
    update = model.written(training)
    encoded = training.encoding != "full"
    received, beside = model.received(training), model.mean_walk(training) + moments_sent
    message = beside + model.travelling_at_most(received, sending, density=1.0) if sending != "full" else 0
    return Disk(
        parts={
            "models": (2 if sending == "full" else 3) * (received + beside),
            "a model's encoded form": message,
            "update": update + moments_sent,
            "its encoded form": moments_sent + model.travelling(update, training.encoding, training.sparse_density)
            if encoded
            else 0,
            "residuals": 2 * MASTER_BYTES * trained if encoded else 0,
            "optimizer state": moments,
            "state of the walk that is corrected by": moments if walk else 0,
            "state of a round that ends or pauses": paused + max(moments, again),
        }
    )


def coordinator_disk(
    model: ModelFigures,
    updates: dict[str, TrainingSettings],
    *,
    rule: str,
    rounds: int,
    keep_rounds: int,
    links: bool = False,
    decoded: bool = True,
    sending: SendingSettings | None = None,
    limited: bool = False,
    comparison: ComparisonSettings | None = None,
) -> Disk:
    """`keep_rounds` models and the initial one, the next one, one update of each facility, one state and the next.

    `updates`: the training settings of each facility. An update that travels as a difference is there as it came, and
    `decoded` as well where it is not averaged so (`coordinator.rounds.verification`). `links`: the archive's file
    system has hard links, so that what adapters leave unchanged is there once (`coordinator.aggregation.unchanged`).
    `sending`: of models that travel as differences, each round's message is there beside its model, and the model that
    is encoded beside the one that facilities will hold. `limited`: a limit may end the federation at its best model,
    which stays. `comparison`: of models after the last round, for which updates and those trained alone stay.
    """
    slots = SERVER_OPTIMIZERS.get(split_rule(rule)[1], "rule").slots
    in_flight = 0
    for training in updates.values():
        whole = model.written(training)
        encoded = training.encoding != "full"
        in_flight += model.travelling(whole, training.encoding, training.sparse_density) if encoded else 0
        in_flight += whole if decoded or not encoded else 0
        in_flight += model.moments(training) * (2 if decoded and encoded else 1)
    kept = min(rounds, keep_rounds) if keep_rounds else rounds
    adapters = max((model.written(training) for training in updates.values() if training.lora.rank), default=0)
    trained = max((model.trained(training) for training in updates.values()), default=model.parameters)
    walk = max((model.mean_walk(training) for training in updates.values()), default=0)
    moments = max((model.moments(training) for training in updates.values()), default=0)
    shared = links and bool(updates) and all(training.lora.rank for training in updates.values())
    following = (0 if shared else model.bytes) + adapters + walk + moments
    messages = encoded_one = 0
    if sending is not None and sending.encoding != "full":
        encoded_one = model.bytes + adapters + walk + moments
        of_one = model.travelling_at_most(model.bytes + adapters, sending.encoding, sending.sparse_density)
        messages = (kept + 1) * (of_one + walk + moments)
    compared = 0
    if comparison is not None and comparison.updates:
        each = sum(model.written(training) + model.moments(training) for training in updates.values())
        compared = each * (2 if comparison.alone else 1)
    return Disk(
        parts={
            "initial model": model.bytes,
            f"models of {kept} rounds": kept * following,
            "the next model": following,
            "the best model": following if limited and kept < rounds else 0,
            "models to be compared": compared + (following if comparison is not None and comparison.last_models else 0),
            "messages of these": messages,
            "the model that is encoded": encoded_one,
            IN_FLIGHT: in_flight,
            "server state, old and new": 2 * MASTER_BYTES * (1 + len(slots) + bool(walk)) * trained,
        }
    )
