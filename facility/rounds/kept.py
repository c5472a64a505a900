"""State directory of a facility, kept across rounds: optimizer state, updates, local parameters, residual."""

from __future__ import annotations

import os
import re
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.files.owners import first_not_ours
from facility.exchange.files.storage import file_error_sentence
from facility.exchange.messages.settings import FacilitySettings

OWN_MODELS = "own_models"
"""In the state: models that stay at this facility (`facility.rounds.own_models`)."""
OF_A_ROUND = re.compile(r"(?:round|sync)-(\d+)(?:\.\d+|\.new|\.old)?")
"""Name of a directory that the trainer leaves of a round, and of what a killed one was writing or replacing."""
STATES = "CROSSFED_STATE"
"""Environment variable: where the state directories of all federations lie."""
UPDATE = "update-"
"""Begins the name under which the update of a round is kept."""


def state_directory(given: Path | None, settings: FacilitySettings, dataset: Path) -> Path:
    """The state directory, made for its owner alone where it is missing: the one that is given, else that beside the
    dataset. Raises `InputError` where it cannot be, where it is not this account's, and where there is no dataset for
    it to lie beside: a path that is wrong is no matter of the state."""
    if given is None and not os.path.exists(dataset):
        raise InputError(
            f"there is no dataset {dataset} here, or this account may not look for it: expected the path of one that "
            "`python -m facility.prepare` made at this facility; correct `dataset` in federation.yml"
        )
    state = state_path(given, settings, dataset)
    made = [state] if given else [shared_directory(dataset), state.parent, state]
    try:
        for place in made:  # one by one: `parents` leaves those above as open as the umask says
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = file_error_sentence(error, state, again=False)
        raise InputError(f"the state directory {state} cannot be made: {why}") from None
    if reason := first_not_ours(made):
        raise InputError(
            f"the state directory {state} is not this account's alone, which keeps updates and keys there: {reason}; "
            "have that removed, or set CROSSFED_STATE to a folder of this account (facility/setup.sh makes one)"
        )
    return state


def state_path(given: Path | None, settings: FacilitySettings, dataset: Path) -> Path:
    """Where the state directory lies: `given`, else $CROSSFED_STATE/<federation>/<facility>, else
    `.crossfed/<federation>/<facility>` beside the dataset."""
    return given or shared_directory(dataset) / settings.federation / settings.facility


def shared_directory(dataset: Path) -> Path:
    """Where the state directories of all federations on a dataset lie."""
    root = os.environ.get(STATES)
    return Path(root) if root else Path(dataset).absolute().parent / ".crossfed"


def by_round(directory: Path, prefix: str = "round-") -> dict[int, Path]:
    """Entries of `directory` under the prefix and a round's number. Raises `OSError` where it cannot be listed."""
    names = os.listdir(directory) if present.is_dir(directory) else []
    found = {name.removeprefix(prefix): directory / name for name in names if name.startswith(prefix)}
    return {int(number): path for number, path in found.items() if number.isdigit()}


def compared_place(state: Path) -> Path:
    """Where the facility's own models lie that are evaluated beside those that it was sent, a folder each."""
    return state / OWN_MODELS / "compared"


def latest_before(directory: Path, round: int) -> Path | None:
    """What was kept after the last round before `round`."""
    earlier = {number: path for number, path in by_round(directory).items() if number < round}
    return earlier[max(earlier)] if earlier else None
