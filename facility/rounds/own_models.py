"""This facility's own models for the comparison after the last round, where masks hide them from all others.

Its last update is kept unmasked in its state, as that round's own job left it, and the model that it trained alone lies
there anyway. Both are evaluated where they are, on this facility's own data, and only figures leave.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.files.links import link_tree, replace_by_links
from facility.exchange.messages.comparison import UPDATE_OF, own_models_of
from facility.exchange.messages.manifest import Manifest, verify_manifest
from facility.exchange.text import number_of
from facility.rounds.alone import OwnModel
from facility.rounds.kept import OWN_MODELS, UPDATE, by_round, compared_place


def keep_own_update(state: Path, update: Path, round: int) -> None:
    """Keep the finished `update` of a round in place of the one before; their files are shared, not copied."""
    target = state / OWN_MODELS / f"{UPDATE}{round}"
    replace_by_links(update, target)
    for number, path in by_round(target.parent, UPDATE).items():
        if number != round:
            shutil.rmtree(path)


def gather_own_models(state: Path, received: Manifest, facility: str) -> dict[str, str]:
    """Put this facility's own models where they are evaluated; returns why others are missing, by model."""
    place = compared_place(state)
    shutil.rmtree(place, ignore_errors=True)
    wanted = own_models_of(received, facility)
    if wanted is None:
        return {}
    place.mkdir(parents=True)
    missing = {}
    for name in wanted.folders(facility):
        if name.startswith(UPDATE_OF):
            assert wanted.update is not None
            source, reason = own_update(state, wanted.update)
        else:
            source, reason = own_training(state, wanted.alone)
        if reason:
            missing[name] = reason
        else:
            link_tree(source, place / name)
    return missing


def own_update(state: Path, round: int) -> tuple[Path, str]:
    """The update of a round, and why it cannot be evaluated, or ''."""
    kept = by_round(state / OWN_MODELS, UPDATE)
    if round not in kept:
        others = f"that of round {max(kept)} is" if kept else "none is"
        return state, f"the update of round {round}, the last that counted, is not kept here; {others}"
    return kept[round], _flaw(kept[round])


def own_training(state: Path, rounds: int) -> tuple[Path, str]:
    """The model after `rounds` rounds alone, and why it cannot be evaluated, or ''."""
    own = OwnModel(state)
    if own.rounds != rounds:
        return (
            state,
            f"the model trained alone for {number_of(rounds, 'round')} is not here; trained rounds: {own.rounds or 0}",
        )
    return own.model(rounds), _flaw(own.model(rounds))


def _flaw(model: Path) -> str:
    try:
        verify_manifest(model)
    except ManifestError as error:
        return f"it is damaged: {error}"
    return ""
