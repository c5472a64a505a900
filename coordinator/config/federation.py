"""`workflow/federation.yml`: the one file a user edits, read strictly, every error with its line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.config.aggregation import AggregationSettings
from coordinator.config.buffering import GroupSettings
from coordinator.config.compatibility import check_groups
from coordinator.config.deployments import Deployment, read_deployment
from coordinator.config.settings import ClaimSettings, SendingSettings, StopSettings
from coordinator.config.yaml_lines import Lined
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings, from_mapping

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
BLANK = re.compile(r"<[^<>]+>")
"""What `crossfed init` leaves where the user has to write."""


@dataclass(frozen=True, kw_only=True)
class Facility:
    """One entry of `facilities:`."""

    name: str
    """Letters, digits, dots, hyphens, underscores; starts with a letter or digit."""
    dataset: str
    """Prepared dataset (facility.prepare) on that facility. Absolute, or `~/...`, or, for a local facility, relative
    to federation.yml. It travels as text only."""
    deployment: dict[str, Any] = field(default_factory=lambda: {"type": "local"})
    """How to reach the facility, see `coordinator.config.deployments`; a mapping, or the word `local`."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """The federation's `training:` with this facility's own changes."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The whole file, checked."""

    file: Path
    name: str
    model: str
    """Directory of the initial Hugging Face checkpoint, relative to the file."""
    rounds: int
    facilities: list[Facility]
    seed: int = 0
    archive: str = ""
    """Directory that outlives the run, relative to the file; default `../.crossfed/<name>/archive`."""
    workdir: str = ""
    """StreamFlow's working directory on the coordinator (and of local facilities), relative to the file; default `../.crossfed/<name>/work`."""
    minimum_facilities: int = 1
    retries: int = 0
    come_backs: int = 50
    keep_rounds: int = 3
    final_evaluation: bool = True
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    sending: SendingSettings = field(default_factory=SendingSettings)
    claims: ClaimSettings = field(default_factory=ClaimSettings)
    stop: StopSettings = field(default_factory=StopSettings)
    groups: GroupSettings | None = None
    """Groups of facilities that average as updates arrive, in place of rounds; absent: rounds."""

    @property
    def archive_path(self) -> Path:
        return self.path(self.archive or f"../.crossfed/{self.name}/archive")

    @property
    def workdir_path(self) -> Path:
        return self.path(self.workdir or f"../.crossfed/{self.name}/work")

    def deployment(self, facility: Facility) -> Deployment:
        """How to reach one of the facilities."""
        number = self.facilities.index(facility)
        return read_deployment(facility.deployment, f"facilities[{number}].deployment")

    def path(self, text: str) -> Path:
        """Absolute form of a path in the file."""
        return (self.file.parent / Path(text).expanduser()).resolve()


def read_federation(file: Path) -> Federation:
    """Read and check federation.yml. Raises `ConfigurationError` with file and line; touches nothing else."""
    lined = Lined(Path(file).resolve())
    try:
        return _build(lined)
    except ConfigurationError as error:
        if error.line is not None:
            raise
        raise lined.error(error.message, error.key or "") from None


def _build(lined: Lined) -> Federation:
    data = lined.data
    if not isinstance(data, dict):
        found = type(data).__name__
        raise lined.error(f"found {found}, expected a mapping with name, model, rounds and facilities", "")
    if empty := [path for path, text in lined.texts() if BLANK.fullmatch(text)]:
        places = ", ".join(f"{path} (line {lined.lines[path]})" for path in empty)
        raise lined.error(f"{len(empty)} value(s) in <angle brackets> are still to be filled in: {places}", empty[0])
    if "file" in data:
        raise lined.error("unknown key 'file'", "file")
    data = dict(data)
    defaults = data.pop("training", None) or {}
    from_mapping(TrainingSettings, defaults, where="training")  # wrong defaults are told at their own line
    entries = data.get("facilities")
    if not isinstance(entries, list) or not entries:
        raise lined.error("facilities is empty or no list, expected entries with name and dataset", "facilities")
    data["facilities"] = [_merged(entry, defaults) for entry in entries]
    federation = from_mapping(Federation, data | {"file": lined.file})
    _check(lined, federation)
    return federation


def _merged(entry: Any, defaults: dict[str, Any]) -> Any:
    """A facility's mapping with the federation's training settings under its own."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    own = entry.get("training")
    if own is None or isinstance(own, dict):
        entry["training"] = defaults | (own or {})
    if isinstance(entry.get("deployment"), str):
        entry["deployment"] = {"type": entry["deployment"]}
    return entry


def _check(lined: Lined, federation: Federation) -> None:
    """What a type alone cannot say."""
    names = [("name", federation.name)]
    names += [(f"facilities[{number}].name", facility.name) for number, facility in enumerate(federation.facilities)]
    for key, name in names:
        if not NAME.fullmatch(name):
            raise lined.error(
                f"{key} is {name!r}, expected 1-63 letters, digits, dots, hyphens or underscores, the first a letter or digit",
                key,
            )
    seen: set[str] = set()
    for number, facility in enumerate(federation.facilities):
        key = f"facilities[{number}]"
        if facility.name.lower() in seen:
            raise lined.error(
                f"facility {facility.name!r} stands twice; names must differ (case does not count)", f"{key}.name"
            )
        seen.add(facility.name.lower())
        read_deployment(facility.deployment, f"{key}.deployment")
        if not facility.dataset.strip():
            raise lined.error(f"{key}.dataset is empty, expected the path of a prepared dataset", f"{key}.dataset")
    if federation.rounds < 1:
        raise lined.error(f"rounds is {federation.rounds}, expected 1 or more", "rounds")
    if not 1 <= federation.minimum_facilities <= len(federation.facilities):
        raise lined.error(
            f"minimum_facilities is {federation.minimum_facilities}, expected 1 to {len(federation.facilities)} (the number of facilities)",
            "minimum_facilities",
        )
    for key in ("retries", "come_backs", "keep_rounds", "seed"):
        if getattr(federation, key) < 0:
            raise lined.error(f"{key} is {getattr(federation, key)}, expected 0 or more", key)
    if federation.groups is not None:
        check_groups(lined.data, federation)


def check_paths(federation: Federation) -> None:
    """Raise `ConfigurationError` when a path on this machine that a run needs is not there."""
    lined = Lined(federation.file)
    model = federation.path(federation.model)
    if not (model / "config.json").is_file():
        raise lined.error(
            f"model {federation.model!r} is {model}, which holds no config.json; expected a Hugging Face checkpoint "
            "(`make demo` makes the demo's, `coordinator/setup.sh` fetches or converts one)",
            "model",
        )
    for number, facility in enumerate(federation.facilities):
        if facility.deployment.get("type") == "local" and not federation.path(facility.dataset).is_dir():
            raise lined.error(
                f"dataset of facility {facility.name!r} is {federation.path(facility.dataset)}, which is no directory; expected the output "
                "of `python -m facility.prepare`",
                f"facilities[{number}].dataset",
            )
