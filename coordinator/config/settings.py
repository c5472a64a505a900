"""`coordinator.json`: what the coordinator's steps need to know of the federation, rendered from federation.yml."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.ahead import AheadSettings
from coordinator.config.closing import (
    LONGEST_QUEUE_HOURS,
    ClosingSettings,
    EvenSettings,
    LimitSettings,
    Rounds,
    count_of,
)
from coordinator.config.evaluation import AskedTasks, ComparisonSettings
from coordinator.config.folded import unfold_description
from coordinator.config.privacy import PrivacySettings
from facility.exchange.delta_codecs import Encoding
from facility.exchange.messages.evaluation import EvaluationSettings
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.masking import MaskedMoments
from facility.exchange.messages.settings import SPARSE_DENSITY, read_settings
from facility.exchange.text import Line, Name
from facility.exchange.validation import AtLeastOne, NonNegative, Positive, Share, validated

FORMAT = 1


@validated(frozen=True, kw_only=True)
class StopSettings:
    """When a federation ends early. With several facilities, each rule must also hold with any one of them left out.

    Under differential privacy each must hold beyond three standard deviations of the noise in the losses, so that noise
    ends nothing: below a target by that much, or, for `patience`, the mean of the losses since the best one above it by
    that much. A loss that has only stopped to fall ends no such federation."""

    target_perplexity: NonNegative[float] = 0.0
    """Stop once the global model's perplexity (geometric mean over facilities) is at or below this; 0 is off."""
    patience: NonNegative[int] = 0
    """Stop after this many rounds without a better global perplexity; 0 is off."""
    divergence: NonNegative[float] = 4.0
    """Stop with an error if the global loss exceeds the best by this many nats per token or is not finite; 0: off."""


@validated(frozen=True, kw_only=True)
class SendingSettings:
    """How a round's model is sent to the facilities; `training.encoding` sets how updates are returned."""

    encoding: Encoding = "full"
    """Whole, or as the difference to the model of the round before (51, 27 or 25 % of bfloat16); whole to a facility
    that does not hold that one. `changed` sends the values that differ and loses nothing: 3.2 % where 6 % of them do by
    a few units in the last place, as after sparse updates."""
    sparse_density: Share = SPARSE_DENSITY
    """Share of the values that `sparse` sends each round, in 1 + 4 x share bits a value; the rest is sent in later
    rounds. The default shows no measurable loss over 10 rounds, 0.35 none over 30."""
    signing_key: Line = ""
    """Private ssh key of the coordinator that signs models and settings (a public one: the agent's); empty: they are
    not signed. Facilities that name allowed signers train nothing else."""
    valid_hours: Positive[float] = 720.0
    """Hours after which a signed model is void; a new start of `crossfed run` signs anew."""


@validated(frozen=True, kw_only=True)
class ClaimSettings:
    """Weight validation: what happens to an update whose report claims more tokens than its settings allow."""

    action: Literal["refuse", "cap", "off"] = "refuse"
    """`refuse` the update, or `cap` the claim to steps x batch x longest sequence and record that in round.json."""
    sequence_tokens: NonNegative[int] = 0
    """Longest sequence of any facility's dataset; 0: the positions that the model has."""


@validated(frozen=True, kw_only=True)
class RoundSettings:
    """Keys of federation.yml that the coordinator's steps read as well, as they are."""

    rounds: Annotated[AtLeastOne[int], BeforeValidator(count_of, json_schema_input_type=AtLeastOne[int] | Rounds)]
    """Rounds of the federation. As a mapping `{count, quorum, grace, late}` it also says how a round closes: see
    `rounds.quorum`."""
    minimum_facilities: AtLeastOne[int] = 1
    """Fewer verified updates than this end the run with an error; the archive stays as it was."""
    retries: NonNegative[int] = 0
    """Times a round is repeated because a facility failed; facilities that are done answer at once."""
    come_backs: NonNegative[int] = 10
    """How often a round is resumed because a facility ran out of time and saved its state mid-round: per facility, and
    for all together. After that, the round proceeds without the facility."""
    keep_rounds: NonNegative[int] = 3
    """Complete rounds whose weights stay in the archive (reports always stay); 0 keeps all."""
    final_evaluation: bool = True
    """After the last round, send the final model once more, for evaluation only."""
    carbon_g_per_kwh: NonNegative[float] = 0.0
    """Grams of CO2 equivalent per kWh of the facilities' electricity, for the report; 0: no carbon figure."""
    trackers: list[Name] = field(default_factory=list)
    """Experiment trackers that the coordinator feeds with the curves of every complete round, by accelerate's names:
    tensorboard, mlflow, wandb (offline unless WANDB_MODE says otherwise)."""
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    """How the updates of a round become the next model."""
    sending: SendingSettings = field(default_factory=SendingSettings)
    """How models are sent to the facilities."""
    claims: ClaimSettings = field(default_factory=ClaimSettings)
    """The largest weight that an update may claim."""
    stop: StopSettings = field(default_factory=StopSettings)
    """When the federation ends before its last round."""
    privacy: PrivacySettings | None = None
    """What the coordinator cannot learn of a facility; absent: it sees every update."""

    @property
    def masks(self) -> PrivacySettings | None:
        """How updates are masked; None where they are not."""
        return self.privacy if self.privacy is not None and self.privacy.secure_aggregation else None

    @property
    def masked_bits(self) -> int:
        """Bits of a value of an update under masks; 0: updates are not masked."""
        return self.masks.bits if self.masks is not None else 0


@validated(frozen=True, kw_only=True)
class CoordinatorSettings(RoundSettings):
    """The rendered file, read by start, receive, aggregate and report."""

    federation: Name
    facilities: list[Name]
    """Names, in the order of federation.yml."""
    sequences: dict[str, int] = field(default_factory=dict)
    """By facility, the sequences that it trains on in a round: steps x batch."""
    closing: ClosingSettings | None = None
    """How a round closes, where it does not wait for all."""
    limits: LimitSettings | None = None
    """When no further round is begun, where `rounds` says so."""
    ahead: dict[str, AheadSettings] = field(default_factory=dict)
    """By facility, how its jobs are submitted ahead of their models; facilities whose jobs are not are absent."""
    even: EvenSettings | None = None
    """How steps are evened out between facilities, where `rounds` says so."""
    longest_queue_hours: NonNegative[float] = LONGEST_QUEUE_HOURS
    """How long a job may wait in a queue; 0: no limit."""
    steps: dict[str, int] = field(default_factory=dict)
    """By facility, the steps that its settings ask for in a round; with `even` alone."""
    described: Annotated[dict[str, Any], BeforeValidator(unfold_description)] = field(default_factory=dict)
    """federation.yml as flat data (`coordinator.config.described`), to find what has changed since an earlier run; what
    all facilities have alike is once in the file."""
    lora: LoraSettings | None = None
    """The adapters that updates must hold; a rank of 0: whole models; null: not known."""
    seed: int = 0
    """Of the federation, from which adapters begin; where late updates of adapters are averaged, else not there."""
    evaluation: EvaluationSettings | None = None
    """The tasks that the coordinator evaluates models on itself; absent: none."""
    asked_tasks: AskedTasks | None = None
    """The facilities that evaluate models on tasks; absent: not known, and whatever scores they report are taken."""
    comparison: ComparisonSettings | None = None
    """The models that are compared after the last round; absent: none."""
    chosen: str = ""
    """What `aggregation.rule: auto` means here, and why; for the report."""
    largest_step: float = 0.0
    """With `privacy.secure_aggregation`: the clip of tensors whose steps nothing is known of; else 0 and not there."""
    masked_moments: MaskedMoments | None = None
    """With `privacy.secure_aggregation`: how second moments travel under masks; absent: none do."""
    settings_sha256: dict[str, str] = field(default_factory=dict)
    """By facility, the digest of its settings file, where models and settings are signed."""
    format: int = FORMAT


def read_coordinator_settings(path: Path) -> CoordinatorSettings:
    """Raises `ConfigurationError`."""
    return read_settings(CoordinatorSettings, path, newest=FORMAT, advice="render again with this version")
