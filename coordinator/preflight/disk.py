"""Bounds on the disk a federation needs, at the coordinator and at a facility, whatever the number of rounds.

They count weights; manifests, logs and reports take some kilobytes more. What is kept when, and what is swept
when: `coordinator.archive.rounds.Archive.prune`, `coordinator.archive.sweep`, `facility.rounds.sweep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import split_rule
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.settings import SendingSettings
from coordinator.memory.figures import EVERYTHING, WALK_BYTES, ModelFigures, moments_bytes
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.sizes import format_bytes
from facility.exchange.text import number_of

IN_FLIGHT = "updates on their way"
"""The part of a coordinator's bound that lies in its work directory; the others lie in the archive."""
MASTER_BYTES = 4
"""Of a parameter in float32."""
OWN_ROUNDS = 3
"""Rounds of which a facility has its own tensors at once: the one that ends, and two before it."""


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
        listed = ", ".join(f"{what} {format_bytes(amount)}" for what, amount in self.parts.items() if amount)
        return f"{format_bytes(self.bytes)} ({listed})"


def facility_disk(
    model: ModelFigures,
    training: TrainingSettings,
    sending: str = "full",
    *,
    federated: Patterns = EVERYTHING,
    masked_bits: int = 0,
    changed: int | None = None,
) -> Disk:
    """Two models (this round's, and the next one arriving), one update, and the state as a round ends.

    As a round ends the state before it and the new one are there: two times AdamW's moments, with the walks where
    drift is corrected (and a third time after an update that was not used); beside them until the update is complete
    the checkpoint in the middle of the round (master weights and moments) of a job that ran out of time, and, where
    jobs are asked to save, the older one that it takes the place of. `sending`: the encoding of received models: as
    one arrives, its message and the two models that are kept are there beside it. `changed`: values of a model that a
    round changes; None: those that this facility trains.

    What is not `federated` stays here in float32: of three rounds, in the model that is trained, and in the update
    until it is taken out of it, which writes what travels anew. Under masks of `masked_bits` a value the masked numbers
    are there beside the update, which is written in float32 where it is masked a second time, and what these leave.
    """
    trained = model.trained(training)
    state = moments_bytes(model, training)
    walk = WALK_BYTES if training.drift_correction else 0
    moments = state if training.keep_optimizer else 0
    paused = state + (MASTER_BYTES - walk) * trained
    again = paused if training.limits.seconds or training.limits.save_every else 0
    moments_sent = model.moments(training)
    update = model.written(training, federated)
    encoded = training.encoding != "full" and not training.lora.rank
    received, beside = model.received(training), model.mean_walk(training) + moments_sent
    here = model.changed(training, federated=federated)
    most = model.travelling_at_most(received, sending, density=1.0, changed=here if changed is None else changed)
    message = beside + most if sending != "full" else 0
    returned = moments_sent + model.returned(training, federated) if encoded else 0
    residual = MASTER_BYTES * here if encoded else 0
    own = model.written(training, federated, whole=True) - update
    with_own = with_own_tensors = 0
    if federated != EVERYTHING:
        with_own_tensors = received + beside + own - model.not_federated(training, federated)
        with_own = max(update + own + moments_sent, returned + residual) - returned - residual
    averaged = model.averaged(training, federated)
    masked = model.sent_back(training, federated, masked_bits=masked_bits) if masked_bits else 0
    return Disk(
        parts={
            "models": (2 if sending == "full" else 3) * (received + beside),
            "a model's encoded form": message,
            "a model with its own tensors": with_own_tensors,
            "its own tensors": OWN_ROUNDS * own,
            "update": (max(update, MASTER_BYTES * averaged) if masked_bits else update) + moments_sent,
            "with its own tensors": with_own,
            "its encoded form": returned,
            "its masked form": 2 * masked,
            "residuals": 2 * (averaged * masked_bits // 8 if masked_bits else residual),
            "optimizer state": moments,
            "state of the walk that is corrected by": moments if walk else 0,
            "state of a round that ends or pauses": paused + max(moments, again),
        }
    )


def _received(
    model: ModelFigures, training: TrainingSettings, federated: Patterns, *, decoded: bool, masked_bits: int
) -> int:
    """Bytes of a facility's update until it is averaged; the arguments are those of `coordinator_disk`."""
    came = model.sent_back(training, federated, masked_bits=masked_bits)
    encoded = training.encoding != "full" and not training.lora.rank and not masked_bits
    return came + (model.written(training, federated) + model.moments(training) if encoded and decoded else 0)


def _compared(
    model: ModelFigures,
    updates: dict[str, TrainingSettings],
    comparison: ComparisonSettings | None,
    federated: Patterns,
    following: int,
) -> int:
    """Bytes of the models that are compared after the last round; `following`: of a mean of the last models."""
    if comparison is None:
        return 0
    each = sum(model.written(training, federated) + model.moments(training) for training in updates.values())
    kept = each * (2 if comparison.alone else 1) if comparison.updates else 0
    return kept + (following if comparison.last_models else 0)


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
    federated: Patterns = EVERYTHING,
    masked_bits: int = 0,
) -> Disk:
    """`keep_rounds` models and the initial one, the next one, one update of each facility, one state and the next.

    `updates`: the training settings of each facility. An update that travels as a difference is there as it came, and
    `decoded` as well where it is not averaged so (`coordinator.rounds.verification`). `links`: the archive's file
    system has hard links, so that what adapters leave unchanged is there once (`coordinator.aggregation.unchanged`).
    `sending`: of models that travel as differences, each round's message is there beside its model, which is decoded
    and so shares nothing with others, and the model that is encoded beside the one that facilities will hold.
    `limited`: a limit may end the federation at its best model, which stays. `comparison`: of models after the last
    round, for which updates and those trained alone stay. `federated`: what updates hold. `masked_bits`: of a value of
    a masked update; 0: updates are not masked.
    """
    slots = SERVER_OPTIMIZERS.get(split_rule(rule)[1], "rule").slots
    in_flight = sum(
        _received(model, training, federated, decoded=decoded, masked_bits=masked_bits) for training in updates.values()
    )
    kept = min(rounds, keep_rounds) if keep_rounds else rounds

    def most(figure: Callable[[TrainingSettings], int]) -> int:
        return max(map(figure, updates.values()), default=0)

    adapters = most(lambda one: model.written(one, federated) if one.lora.rank else 0)
    averaged = most(lambda one: model.averaged(one, federated)) if updates else model.parameters
    changed = model.changed(*updates.values(), federated=federated) if updates else model.parameters
    walk, moments = most(model.mean_walk), most(model.moments)
    shared = links and bool(updates) and all(training.lora.rank for training in updates.values())
    linked = adapters + walk + moments + (0 if shared else model.bytes)
    following, messages, encoded_one = linked, 0, 0
    if sending is not None and sending.encoding != "full":
        following, encoded_one = model.bytes + adapters + walk + moments, linked  # decoded as every receiver does
        density = sending.sparse_density
        of_one = model.travelling_at_most(model.bytes + adapters, sending.encoding, density, changed)
        messages = (kept + 1) * (of_one + walk + moments)
    return Disk(
        parts={
            "initial model": model.bytes,
            f"models of {number_of(kept, 'round')}": kept * following,
            "the next model": following,
            "the best model": following if limited and kept < rounds else 0,
            "models to be compared": _compared(model, updates, comparison, federated, following),
            "messages of these": messages,
            "the model that is encoded": encoded_one,
            IN_FLIGHT: in_flight,
            "server state, old and new": 2 * MASTER_BYTES * (1 + len(slots) + bool(walk)) * averaged,
        }
    )
