"""`workflow/federation.yml`: the one file a user edits, read strictly, every error with its line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from coordinator.aggregation.settings import AUTO
from coordinator.config.ahead import AheadSettings, OfFacility, OfFederation, ahead_of
from coordinator.config.closing import (
    LONGEST_QUEUE_HOURS,
    ClosingSettings,
    EvenSettings,
    LimitSettings,
    Rounds,
    carries_late,
)
from coordinator.config.compatibility import (
    check_adapters,
    check_comparison,
    check_drift,
    check_evaluates,
    check_evaluation,
    check_facilities,
    check_moments,
    check_quorum,
    check_trainers,
)
from coordinator.config.deployments import Deployment, Kind
from coordinator.config.evaluation import EvaluationPlan
from coordinator.config.facility_names import check_names
from coordinator.config.groups import KEY as GROUPS
from coordinator.config.groups import without_groups
from coordinator.config.locate import named_in_utf8
from coordinator.config.masked_moments import masked_moments_obstacle
from coordinator.config.notifying import NotifySettings
from coordinator.config.privacy import check_privacy, check_switched
from coordinator.config.publishing import Creator, PublicSettings
from coordinator.config.resolution import (
    choice_of,
    looks_pretrained,
    model_at,
    parameters_of,
    resolve_aggregation,
    resolve_training,
    with_measured,
)
from coordinator.config.row_weights import with_row_weights
from coordinator.config.settings import RoundSettings
from coordinator.config.sparse_updates import are_sparse, check_rounds, for_sparse_updates, sending_of
from coordinator.config.yaml_lines import Lined
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import real_path
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.trainer import TrainerSettings
from facility.exchange.text import DatasetPath, Line, Name
from facility.exchange.validation import NonNegative, parse_dataclass, unknown_key, validated

BLANK = re.compile(r"<[^<>]+>")
"""What `crossfed init` leaves where the user has to write."""


def _by_word(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


@validated(frozen=True, kw_only=True)
class Facility:
    """One entry of `facilities:`."""

    name: Name
    """Letters, digits, dots, hyphens, underscores; starts with a letter or digit."""
    dataset: DatasetPath
    """Prepared dataset (facility.prepare) on that facility. Absolute, or `~/...`; a relative path counts from
    federation.yml for a local facility, and for others from `environment.home`. Only this path is sent; the dataset's
    files never are."""
    deployment: Annotated[Deployment, BeforeValidator(_by_word, json_schema_input_type=Deployment | Kind)] = field(
        default_factory=Deployment
    )
    """How to reach the facility: a mapping, or a word such as `local`."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Changes of this facility to the federation's `training:`."""
    trainer: TrainerSettings | None = None
    """Which program trains here; absent: the federation's `trainer`."""
    submit_ahead: OfFacility = None
    """This facility's own `submit_ahead`; absent: that of the federation."""
    public: PublicSettings = field(default_factory=PublicSettings)
    """What may be published about this facility."""
    peer_signers: Line = ""
    """This facility's own `privacy.peer_signers`; empty: that of the federation."""


@validated(frozen=True, kw_only=True)
class FederationFile(RoundSettings):
    """The keys of federation.yml."""

    name: Name
    """Name of the federation: of its archive, and of its jobs in every queue."""
    model: Line
    """Directory of the initial Hugging Face checkpoint, relative to the file."""
    facilities: list[Facility]
    """The participating facilities, one entry each."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """What every facility does in a round; an entry of `facilities:` may change any key of it."""
    title: Line = ""
    """Title of the publication; default: the name."""
    license: Line = ""
    """License of the published model, as an SPDX identifier such as `apache-2.0`."""
    creators: list[Creator] = field(default_factory=list)
    """Who is to be cited."""
    funding: list[Line] = field(default_factory=list)
    """Grants and compute allocations, one line each."""
    base_model: Line = ""
    """The initial model's name on the Hugging Face Hub, for the model card."""
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    """Evaluation of the global model on tasks of lm-eval, in the facilities' own jobs, and of all models at the end."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Which program trains at the facilities: CrossFed's own, or a module of yours that keeps its contract."""
    seed: NonNegative[int] = 0
    """Seed of the federation; each facility derives its own from it, its name and the round."""
    archive: Line = ""
    """Directory that outlives the run, relative to the file; default `../.crossfed/<name>/archive`."""
    progress_seconds: NonNegative[int] = 5
    """Seconds between two looks at a running job's progress file, one small command each over the open connection; 0:
    never."""
    submit_ahead: OfFederation = None
    """Hide queues: submit a facility's next job while its present one trains, and give it its round once its model has
    come. `true`, or a mapping: see `submit_ahead.wait`."""
    notify: NotifySettings = field(default_factory=NotifySettings)
    """Whom to notify when the federation is done, stopped or stuck, a login expires or a facility is lost."""
    pretrained: bool | None = None
    """Whether the initial model was trained before, which `aggregation.rule: auto` looks at. Absent: it is read from
    the model's normalisation weights, which are all 1 or 0 in a new model; true where the model is not there."""
    workdir: Line = ""
    """StreamFlow's working directory on the coordinator (and of local facilities), relative to the file; default
    `../.crossfed/<name>/work`."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum_facilities <= len(self.facilities):
            raise ConfigurationError(
                f"minimum_facilities is {self.minimum_facilities}, expected 1 to {len(self.facilities)} "
                "(the number of facilities)"
            )
        check_evaluation(self.evaluation, [one.name for one in self.facilities])
        here = [one.name for one in self.facilities if not one.deployment.workdir]
        check_names([one.name for one in self.facilities], here)


@validated(frozen=True, kw_only=True)
class Federation(FederationFile):
    """The whole file, checked, and where it is."""

    file: Path
    chosen: str = ""
    """What `auto` means here, and why."""
    deprecated: str = ""
    """How a section of an earlier version was read, and what to write in its place; empty: the file has none."""
    closing: ClosingSettings | None = None
    """What `rounds:` says beside the number; None: every round waits for all."""
    limits: LimitSettings | None = None
    """Its deadline and node-hours; None: neither."""
    even: EvenSettings | None = None
    """How steps are evened out; None: they are fixed."""
    longest_queue_hours: NonNegative[float] = LONGEST_QUEUE_HOURS
    """How long a job may wait in a queue; 0: no limit."""

    @property
    def names(self) -> list[str]:
        """The facilities' names, in the order of the file."""
        return [one.name for one in self.facilities]

    @property
    def training_of(self) -> dict[str, TrainingSettings]:
        """What each facility trains, by its name."""
        return {one.name: one.training for one in self.facilities}

    def check_named(self, option: str, given: Iterable[str]) -> None:
        """Raise `ConfigurationError` where an option is given for a facility that the federation does not have."""
        if unknown := sorted({*given} - {*self.names}):
            raise ConfigurationError(f"{option} names {unknown[0]!r}; the facilities are {', '.join(self.names)}")

    @property
    def ahead(self) -> Mapping[str, AheadSettings]:
        """By facility, how its jobs are submitted ahead; facilities that do not are absent."""
        return ahead_of(self.submit_ahead, [(one.name, one.deployment, one.submit_ahead) for one in self.facilities])

    @property
    def elastic(self) -> bool:
        """Whether each job takes the steps that fit until its round's end."""
        return self.even is not None and self.even.steps == "elastic"

    @property
    def archive_path(self) -> Path:
        return self.path(self.archive or f"../.crossfed/{self.name}/archive")

    @property
    def workdir_path(self) -> Path:
        return self.path(self.workdir or f"../.crossfed/{self.name}/work")

    def trainer_of(self, facility: Facility) -> TrainerSettings:
        """Which program trains at a facility."""
        return facility.trainer or self.trainer

    def path(self, text: str) -> Path:
        """Absolute form of a path in the file."""
        return real_path(self.file.parent / Path(text).expanduser())


def read_federation(file: Path) -> Federation:
    """Read and check federation.yml. Raises `ConfigurationError` with file and line; touches nothing else."""
    lined = Lined(named_in_utf8(Path(file)))
    try:
        return _build(lined)
    except ConfigurationError as error:
        if error.line is not None:
            raise
        raise lined.error(error.message, error.key or "") from None


def _build(lined: Lined) -> Federation:
    data = lined.data
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"{data!r:.40}"
        raise lined.error(f"found {found}, expected a mapping with name, model, rounds and facilities", "")
    if empty := [path for path, text in lined.texts() if BLANK.fullmatch(text)]:
        places = ", ".join(f"{path} (line {lined.lines[path]})" for path in empty)
        raise lined.error(f"values in <angle brackets> are still to be filled in: {places}", empty[0])
    _check_keys(data)
    data = dict(data)
    defaults = data.get("training") or {}
    parse_dataclass(TrainingSettings, defaults, where="training")  # so that an error in them has their own line
    data["training"] = defaults
    entries = data.get("facilities")
    if not isinstance(entries, list) or not entries:
        raise lined.error("facilities is empty or not a list, expected entries with name and dataset", "facilities")
    data["facilities"] = [_merged(entry, defaults) for entry in entries]
    data, deprecated = without_groups(data)
    rounds = data.get("rounds")
    closing = parse_dataclass(Rounds, rounds, where="rounds") if isinstance(rounds, dict) else None
    declared = parse_dataclass(FederationFile, data)
    keys = {key.name: getattr(declared, key.name) for key in dataclasses.fields(declared)}
    federation = Federation(
        file=lined.file,
        deprecated=deprecated,
        closing=_closing(closing, declared),
        limits=_limits(closing),
        even=_even(closing, declared),
        longest_queue_hours=LONGEST_QUEUE_HOURS if closing is None else closing.longest_queue_hours,
        **keys,
    )
    check_rounds(federation.training_of, federation.rounds)
    sending = sending_of(federation.sending, data.get("sending") or {}, [*federation.training_of.values()])
    federation = dataclasses.replace(federation, sending=sending)
    federation = _chosen(federation, data.get("aggregation") or {}, [entry["training"] for entry in data["facilities"]])
    _check_together(federation, lined, data.get("privacy"))
    return federation


def _check_together(federation: Federation, lined: Lined, privacy: Any) -> None:
    """Raise `ConfigurationError`, with the key, for settings that exclude each other; `privacy`: as it is written."""
    others = any(not federation.trainer_of(one).built_in for one in federation.facilities)
    check_comparison(federation.evaluation, federation, other_trainers=others, even=federation.even is not None)
    described = federation.training_of
    check_adapters(federation.aggregation, described)
    check_evaluates(federation.evaluation, described)
    check_drift(federation.aggregation, described, masked=bool(federation.masks))
    check_moments(described)
    check_switched(privacy)
    if federation.privacy is not None:
        check_privacy(
            federation.privacy,
            federation.aggregation,
            training=described,
            peer_signers={
                one.name: one.peer_signers or federation.privacy.peer_signers for one in federation.facilities
            },
            model_encoding=federation.sending.encoding,
            dataset_cards=[one.name for one in federation.facilities if one.public.dataset_card],
        )
    check_facilities(federation.aggregation, described)
    for number, facility in enumerate(federation.facilities):
        if federation.masks and facility.deployment.firecrest.url:
            key = f"facilities[{number}].deployment.type"
            raise lined.error(f"{key}: secure aggregation runs commands at a login node; FirecREST gives none", key)
    _ = federation.ahead  # raises where it cannot work


def _check_keys(data: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for an unknown key of the file itself, then for one that is not there."""
    known = [field.name for field in dataclasses.fields(FederationFile)]
    for key in data:
        if key not in (*known, GROUPS):
            raise unknown_key(FederationFile, [key], "", None)
    if absent := [key for key in ("name", "model", "rounds", "facilities") if key not in data]:
        raise ConfigurationError(f"{', '.join(absent)} missing, expected name, model, rounds and facilities")


def _chosen(federation: Federation, given: dict[str, Any], given_training: list[dict[str, Any]]) -> Federation:
    """The federation with measured values for `auto`.

    `given`: the `aggregation:` section as written; `given_training`: each facility's `training:` with the federation's
    under it.
    """
    training = [facility.training for facility in federation.facilities]
    own = check_trainers({one.name: (federation.trainer_of(one), one.training) for one in federation.facilities})
    if own and federation.even is not None:
        raise ConfigurationError(
            f"rounds.steps is {federation.even.steps!r}, but a facility has a trainer of its own, which takes the "
            "steps of its settings; remove one of them",
            key="rounds",
        )
    unfit = federation.masks and any(masked_moments_obstacle(one, len(training)) for one in training)
    if unfit or own:  # shared moments could not be masked, or another trainer's are not known
        training = resolve_training(training, "personal")
    model, pretrained = model_at(federation.path(federation.model)), federation.pretrained
    if pretrained is None:
        pretrained = looks_pretrained(model)
    settings = federation.aggregation
    choice = choice_of(training, federation.rounds, settings, pretrained=pretrained, parameters=parameters_of(model))
    if are_sparse(training):
        choice = for_sparse_updates(choice, settings, federation.sending)
    training = resolve_training(training, choice.optimizer_state)
    if settings.rule == AUTO:
        training = with_measured(training, given_training, choice)
    facilities = [
        dataclasses.replace(facility, training=one)
        for facility, one in zip(federation.facilities, training, strict=True)
    ]
    aggregation = resolve_aggregation(given, settings, choice, carried=carries_late(federation.closing))
    trained = {one.name: one.training for one in facilities}
    auto = settings.rule == AUTO
    aggregation, left_out = with_row_weights(aggregation, trained, masked=bool(federation.masks), chosen=auto)
    reason = choice.reason + left_out if auto else f"aggregation.rule is given: {settings.rule}"
    if aggregation.incomplete_rate == "share":
        reason += "; a round that some facilities miss moves the model by the present share of their weights"
    return dataclasses.replace(federation, facilities=facilities, aggregation=aggregation, chosen=reason)


def _even(described: Rounds | None, declared: FederationFile) -> EvenSettings | None:
    """How steps are evened out, where `rounds:` is a mapping that asks for it."""
    if described is None or described.steps == "fixed":
        return None
    if declared.privacy is not None:
        raise ConfigurationError(
            f"rounds.steps is {described.steps!r} with privacy: what an update gives away, and masked updates' "
            "weights, are agreed from the settings' steps before a round; remove one of them",
            key="rounds",
        )
    return EvenSettings(steps=described.steps, least_steps=described.least_steps, most_steps=described.most_steps)


def _limits(described: Rounds | None) -> LimitSettings | None:
    """Deadline and node-hours, where `rounds:` is a mapping that names one."""
    if described is None or not (described.deadline or described.node_hours):
        return None
    return LimitSettings(deadline=described.deadline, node_hours=described.node_hours)


def _closing(described: Rounds | None, declared: FederationFile) -> ClosingSettings | None:
    """How rounds close, where `rounds:` is a mapping. Raises `ConfigurationError` for what cannot go together."""
    if described is None:
        return None
    check_quorum(described, declared, len(declared.facilities))
    if described.late == "wait" or described.needed(len(declared.facilities)) == len(declared.facilities):
        return None
    keys = {key.name: getattr(described, key.name) for key in dataclasses.fields(ClosingSettings)}
    return ClosingSettings(**keys)


def _merged(entry: Any, defaults: dict[str, Any]) -> Any:
    """A facility's mapping with the federation's training settings under its own."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    own = entry.get("training")
    if own is None or isinstance(own, dict):
        entry["training"] = defaults | (own or {})
    return entry
