"""Differential privacy in a federation's and in a facility's settings, and what a facility reports of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.messages.layout import LayoutSettings
from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.strict_json import Fields
from facility.exchange.text import rounded_down
from facility.exchange.validation import AtLeastOne, Positive, validated

Unit = Literal["document", "block"]
DETAILS = "privacy"
"""In a report's details: `PrivacyReport`."""
DATASET_LIMIT = "CROSSFED_DATASET_EPSILON"
"""Environment variable of a site: the most epsilon that all federations on one dataset may spend together."""
RELEASED = "released"
"""In the `extra` of a model's manifest: by facility, the noised steps that its reports count."""
MOST_STEPS = 10**12
LEAST_CLIP = 1e-20
"""Far above 1.2e-38, below which float32 has fewer digits the smaller a number is."""
WITHHELD = -1.0
"""In place of a training loss, which is not noised."""


@validated(frozen=True, kw_only=True)
class DifferentialSettings:
    """Record-level differential privacy of every facility's training, by DP-SGD."""

    epsilon: Positive[float]
    """Largest privacy loss of one unit at the end of all rounds; below 10 is usual, below 1 is strong."""
    delta: Annotated[float, Gt(0), Lt(1)]
    """Probability that is left out of the bound; at most one over the number of units, and better far below."""
    unit: Unit = "document"
    """What is protected: a `document` with all its tokens (needs documents that share no context), or a `block` of
    the prepared dataset, which protects a whole document only where that lies in one block."""
    clip: Annotated[float, Ge(LEAST_CLIP)] = 1.0
    """Largest L2 norm of one unit's gradient (of its mean loss) in the sum of a step; not below 1e-20, where float32
    would round single values up, so that a unit has up to twice that norm."""
    blocks_per_document: AtLeastOne[int] = 4
    """Blocks of one document that are trained on; later ones are left out. It bounds memory, not privacy."""


@validated(frozen=True, kw_only=True)
class PrivacyReport:
    """What a facility says of its budget after a round."""

    epsilon: float
    """Stated, for the end of all rounds."""
    delta: float
    unit: Unit
    clip: float
    spent: float
    """Epsilon of all training steps so far."""
    spent_on_validation: float
    """Epsilon of all validation figures so far, for the units of the validation split, which are others."""
    noise_multiplier: float
    sampling_rate: float
    steps: int
    """Noised steps since the beginning, those of interrupted attempts included."""
    validation_deviation: float
    """Standard deviation of the noise in a validation loss, nats."""


def privacy_of(details: dict[str, Any]) -> PrivacyReport | None:
    """What a report's details say; None where nothing. Raises `ManifestError` where it is malformed."""
    if DETAILS not in details:
        return None
    if not isinstance(details[DETAILS], dict):
        raise ManifestError(f"report: {DETAILS} is not an object")
    found = Fields(raw=details[DETAILS], where=f"report: {DETAILS}")
    numbers = {
        name: found.number(name, least=0.0, most=1e9)
        for name in (
            "epsilon",
            "delta",
            "clip",
            "spent",
            "spent_on_validation",
            "noise_multiplier",
            "sampling_rate",
            "validation_deviation",
        )
    }
    return PrivacyReport(
        unit=found.one_of("unit", "document", ("document", "block")),
        steps=found.whole("steps", most=MOST_STEPS),
        **numbers,
    )


def steps_reported(received: Manifest, facility: str) -> int:
    """How many noised steps of a facility the sender of a model has reports of; 0: none, or nothing sensible."""
    released = received.extra.get(RELEASED)
    steps = released.get(facility) if isinstance(released, dict) else None
    return steps if type(steps) is int and 0 < steps <= MOST_STEPS else 0


def check_layout(layout: LayoutSettings, *, ranks: int = 1) -> None:
    """Raise `ConfigurationError` for layouts whose gradients are summed before a unit's own can be clipped."""
    wrong = [
        (layout.stages > 1, "stages", "a pipeline adds the gradients of a micro-batch up stage by stage"),
        (bool(layout.plan), "plan", "a plan may cut the model into stages"),
        (layout.offload, "offload", "offloading belongs to FSDP, which sums gradients before they can be clipped"),
        (layout.compile, "compile", "compiled blocks cannot be asked for the gradient of each unit"),
        (
            layout.activation_checkpointing != "none",
            "activation_checkpointing",
            "memory is bounded by training.micro_batch_sequences, whose units have a gradient each",
        ),
        (
            ranks > 1 and layout.sharding != "NO_SHARD" and layout.replicas != ranks,
            "sharding",
            f"{layout.sharding} sums the gradients of several ranks before a unit's can be clipped; expected NO_SHARD "
            "(every rank holds the model and takes its share of the units)",
        ),
    ]
    for refused, key, why in wrong:
        if refused:
            raise ConfigurationError(
                f"layout.{key} is {getattr(layout, key)!r}, which differential privacy excludes: {why}",
                key=f"layout.{key}",
            )


def sampling_rate(expected: int, units: int, settings: DifferentialSettings) -> float:
    """Probability with which each unit is drawn for a step. Raises `InputError`.

    The coordinator asks before a federation starts, the trainer before its first step.
    """
    if units < expected:
        raise InputError(
            f"training.batch_sequences is {expected}, but the dataset has {units} units ({settings.unit}s) to draw "
            "them from: prepare more text, or lower the batch"
        )
    if settings.delta > 1 / units:
        raise InputError(
            f"privacy.differential.delta is {settings.delta:g}, more than one over the {units} units of the dataset: "
            f"to give one of them away whole would be allowed; expected at most {rounded_down(1 / units):g}"
        )
    return expected / units
