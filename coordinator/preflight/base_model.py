"""Checks of the base model that stays at a facility where only adapters travel: is it there, and alike everywhere?"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.config.federation import Facility
from coordinator.preflight.alike import others_than_most
from coordinator.preflight.probe_answer import BaseModelAnswer
from coordinator.preflight.row import Row, fail, ok, warning
from facility.exchange.sizes import format_bytes

CHECK = "base model"


def check_base_model(facility: Facility, found: BaseModelAnswer | None) -> list[Row]:
    """One row where the facility's probe was asked for its base model, by the digest that federation.yml states."""
    name, lora = facility.name, facility.training.lora
    if not lora.base or found is None:
        return []
    if found.error:
        problem = f"{lora.base} is not a model at the facility: {found.error}"
        return [fail(name, CHECK, problem, "correct training.lora.base, or fetch the model there")]
    if found.sha256 is None:
        within = f"not hashed within {found.seconds:g} s" if found.seconds else "never hashed"
        unknown = f"{lora.base} ({format_bytes(found.bytes)}) was {within} there"
        return [warning(name, CHECK, unknown, f"run `python -m facility.base_model {lora.base}` there once, in a job")]
    digest = found.sha256
    if not lora.base_sha256:
        stated = f"{lora.base} has the digest {digest}, and federation.yml states none"
        return [warning(name, CHECK, stated, f"set training.lora.base_sha256: {digest}")]
    if digest != lora.base_sha256:
        other = f"{lora.base} has the digest {digest}, expected {lora.base_sha256}: another model"
        return [fail(name, CHECK, other, "fetch the base that the federation names there")]
    return [ok(name, CHECK, f"{lora.base} is the stated one ({digest[:16]}...)")]


def check_same_base(answers: Mapping[str, BaseModelAnswer | None]) -> list[Row]:
    """A row for each facility whose base model is not the one that most have; for all, where most have none in common.

    `answers`: what each probe said of it.
    """
    digests = {name: one.sha256 for name, one in answers.items() if one is not None and one.sha256}
    return [
        fail(
            name,
            CHECK,
            f"its base model has the digest {digests[name]}, {others}: adapters of different models would be averaged",
            "fetch the same model at all facilities, and state training.lora.base_sha256",
        )
        for name, others in others_than_most(digests).items()
    ]
