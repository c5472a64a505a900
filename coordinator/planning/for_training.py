"""A measured problem with the memory of what a facility will train: adapters, a base in 4 bits or half precision.

`facility.measure` measures a whole model that is trained in float32 by AdamW. Memory of another training follows the
law that the trainer and `crossfed check` follow (`facility.exchange.memory`). Seconds stay as they were measured, less
what frozen weights do not compute and with what adapters add (`coordinator.planning.frozen_seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.config.federation import Federation
from coordinator.memory.figures import ModelFigures, model_figures
from coordinator.memory.layouts import rows_of
from coordinator.memory.need import needed_by_plan
from coordinator.memory.weights import dimensions_of, weights_of
from coordinator.planning.frozen_seconds import with_frozen
from coordinator.problem.problem import Problem
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.memory.rank import RankLayout, exchanged_bytes, logits_bytes, reduced_bytes
from facility.exchange.memory.replicas import exchanged_vectors, exchanges_state
from facility.exchange.memory.units import UnitMemory, memory_of_units
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a facility will train, and on which kind of device."""

    model: ModelFigures
    training: TrainingSettings
    tokens: int
    """Tokens of a sequence."""
    device: str
    """cpu or cuda."""


def trained_at(federation: Federation, name: str, profile: Mapping[str, Any]) -> Trained:
    """What the facility of that name trains, in sequences as the profile measured them. Raises `ConfigurationError`."""
    federation.check_named("--facility", [name])
    measured = profile.get("profile")
    tokens = measured.get("tokens") if isinstance(measured, dict) else profile.get("sample_tokens")
    if type(tokens) is not int or tokens < 1:
        raise ConfigurationError(
            "the problem says neither profile.tokens nor sample_tokens, the tokens of a sequence, which memory needs: "
            "measure it by facility.measure, or write sample_tokens"
        )
    devices = profile.get("devices")
    gpus = isinstance(devices, list) and any(
        ":cuda" in str(one.get("id", "")) for one in devices if isinstance(one, dict)
    )
    training = federation.training_of[name]
    return Trained(
        model=model_of(federation.path(federation.model)),
        training=training,
        tokens=tokens,
        device="cuda" if gpus or training.device == "cuda" else "cpu",
    )


def model_of(directory: Path) -> ModelFigures:
    """The initial model's figures. Raises `ConfigurationError`."""
    try:
        return model_figures(directory)
    except InputError as error:
        raise ConfigurationError(f"the initial model {directory} cannot be read: {error}") from None


def with_memory(problem: Problem, trained: Trained) -> Problem:
    """The problem with units as large as the training makes them, never smaller than the plan will state, and as fast.

    What is needed once on a device (a dequantised layer, logits of a chunk, a block that is computed again, gradients
    on their way to the host, one before it is added) leaves its memory beforehand. With `layout.shards` a device of the
    problem stands for as many ranks: its memory is that of one of them, its samples are those that one of them reads.
    """
    training, dimensions = trained.training, dimensions_of(trained.model)
    if len(problem.units) != dimensions.blocks + 2:
        raise ConfigurationError(
            f"the problem has {len(problem.units)} units, the initial model {dimensions.blocks + 2} (embedding, "
            f"{dimensions.blocks} blocks, head): measure the model that the federation trains"
        )
    sizes = [training.micro_batch_sequences] if training.micro_batch_sequences else list(problem.micro_batch_samples)
    rows = [rows_of(training, size * trained.tokens, dimensions.vocabulary, trained.device) for size in sizes]
    weights = weights_of(trained.model, training, chunked=all(rows))
    units = memory_of_units(weights, dimensions, training)
    timed = with_frozen(problem.units, weights, dimensions, trained.tokens)
    at_once = [logits_bytes(chunk, dimensions, training) for chunk in rows]
    a_token, once = max(one for one, _ in at_once), max(one for _, one in at_once)
    again = max(sizes) * trained.tokens * max(unit.again for unit in units)
    shards, head = training.layout.shards or 1, len(units) - 1
    gathered = [_gathered(unit, end=number in (0, head)) for number, unit in enumerate(units)]
    offloaded = shards > 1 and training.layout.offload and trained.device == "cuda"
    leaving = reduced_bytes(units[1:-1], shards, training) if offloaded else 0
    added = 4 * max(unit.largest_trained for unit in units) if shards == 1 else 0
    working = 4 * max(unit.largest_in_bits for unit in units) + once + again + leaving + added
    replicated = training.sync.policy == "allreduce"
    return replace(
        problem,
        micro_batch_samples=tuple(sizes),
        devices=tuple(
            one if one.memory_bytes is None else replace(one, memory_bytes=max(1.0, one.memory_bytes - working))
            for one in problem.devices
        ),
        units=tuple(
            replace(
                measured,
                parameter_bytes=4.0 * unit.trained / shards,
                state_bytes=_resident(unit, training, offloaded=offloaded)
                + (shards > 1) * whole
                + (0 if replicated or problem.replicas == (1,) else _exchanged(unit, training, trained.device)),
                gathered_bytes=max(0.0, whole - unit.copies) if replicated and shards == 1 else 0.0,
                stored_bytes=trained.tokens
                * (unit.kept + unit.cast * (shards == 1) + (a_token if number == head else 0.0)),
            )
            for number, (measured, unit, whole) in enumerate(zip(timed, units, gathered, strict=True))
        ),
    )


def _resident(unit: UnitMemory, training: TrainingSettings, *, offloaded: bool) -> float:
    """Bytes of a unit on a rank: weights, gradients, optimizer state, correction of drift, proximal term, of which its
    shards are parts; whole, with the copies that autocast makes, without shards. What is `offloaded` is elsewhere."""
    shards = training.layout.shards or 1
    a_trained = 4 + 4 * training.drift_correction + 4 * (training.proximal > 0)
    whole = unit.weights + a_trained * unit.trained + unit.state
    return (0.0 if offloaded else whole / shards) + (unit.copies if shards == 1 else 0.0)


def _exchanged(unit: UnitMemory, training: TrainingSettings, device: str) -> float:
    """Bytes of a unit in what replicas exchange, where the facility's policy leaves them weights of their own."""
    layout = RankLayout(
        sequences=1,
        tokens=1,
        shards=training.layout.shards or 1,
        exchanged=exchanged_vectors(training.sync, device),
        exchanges_state=exchanges_state(training.sync),
    )
    return exchanged_bytes([unit], layout) + 1.0


def _gathered(unit: UnitMemory, *, end: bool) -> float:
    """At most what FSDP2 gathers of a unit; `end`: embedding or head, of which the gradients are there whole, twice,
    while they are reduced."""
    return unit.gathered + 8 * unit.trained * end


def batch_of_ranks(training: TrainingSettings) -> int:
    """Sequences of a step that a plan cuts up: those of one rank for each device, where ranks share one.

    Raises `ConfigurationError` where the batch is not as much for each.
    """
    shards = training.layout.shards or 1
    if training.batch_sequences % shards:
        raise ConfigurationError(
            f"training.batch_sequences is {training.batch_sequences}, expected a multiple of layout.shards {shards}: "
            "the ranks that share a device of a plan read equal parts"
        )
    return training.batch_sequences // shards


def with_stated_memory(plan: Plan, problem: Problem, trained: Trained) -> Plan:
    """The plan with each device's memory as the trainer and `crossfed check` work it out; `problem` as measured."""
    seconds, shards = "seconds are as they were measured", trained.training.layout.shards or 1
    if any(not one.trained for one in weights_of(trained.model, trained.training, chunked=False)):
        seconds = "seconds are modelled from the whole model's: without gradients of frozen weights, with adapters"
        if trained.training.lora.quantize_base != "none":
            seconds += ", not counting that a base in 4 bits is unpacked"
    needed = needed_by_plan(trained.model, trained.training, plan, trained.tokens, device=trained.device)
    return replace(
        plan,
        loads=tuple(
            replace(
                load,
                memory_bytes=float(needed.get(load.device, 0.0)),
                memory_limit_bytes=problem.devices[load.device].memory_bytes,
            )
            for load in plan.loads
        ),
        reasons=(
            *plan.reasons,
            f"memory is that of the facility's training settings; {seconds}",
            *([f"each device is {shards} ranks that share it (layout.shards)"] if shards > 1 else []),
        ),
    )
