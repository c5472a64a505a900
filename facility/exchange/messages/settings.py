"""Training settings of one facility: written by `crossfed render`, staged with every round, read by the trainer."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Lt

from facility.exchange.delta_codecs import CODECS, FULL, Encoding, declared_codec
from facility.exchange.errors import ConfigurationError
from facility.exchange.json_values import read_values
from facility.exchange.messages.evaluation import FacilityEvaluation
from facility.exchange.messages.images import ImageSettings
from facility.exchange.messages.layout import LayoutSettings, LimitSettings, LoraSettings
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.preference import BENEATH, PreferenceSettings
from facility.exchange.messages.privacy import DifferentialSettings, check_layout
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.messages.trainer import TrainerSettings
from facility.exchange.one_of import one_of
from facility.exchange.text import Line, Name, Pattern
from facility.exchange.validation import (
    NonNegative,
    Positive,
    Share,
    ShareOrNone,
    check_format,
    parse_dataclass,
    validated,
    with_settings,
)

FORMAT = 1
MOST_BYTES = 8 << 20
"""Most bytes of a settings file."""
T = TypeVar("T")
Decay = Annotated[float, Ge(0), Lt(1)]
SPARSE_DENSITY = 0.75
"""Share of the values that `sparse` sends by default."""


@validated(frozen=True, kw_only=True)
class TrainingSettings:
    """What a facility does in one round. Every field may stand under `training:` in `workflow/federation.yml`."""

    steps: Positive[int] = 100
    """Optimizer steps in one round."""
    batch_sequences: Positive[int] = 8
    """Sequences (blocks) per optimizer step over the whole facility."""
    micro_batch_sequences: NonNegative[int] = 0
    """Sequences per forward pass and rank; 0: as many as the batch gives each rank."""
    optimizer: Annotated[str, one_of(OPTIMIZERS.built_in)] = "adamw"
    """Name of the inner optimizer, or the dotted path of your own. A change between rounds begins with new state."""
    optimizer_parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters that the optimizer declares for itself; the keys of AdamW stand beside this one."""
    learning_rate: Positive[float] = 1e-4
    """Peak learning rate."""
    minimum_learning_rate_ratio: ShareOrNone = 0.1
    """Learning rate at the end of the federation as a share of the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape over the whole federation (all rounds), after one warm-up."""
    warmup_steps: NonNegative[int] = 0
    """Steps of linear warm-up, once for the whole federation."""
    weight_decay: NonNegative[float] = 0.0
    """AdamW's decoupled weight decay; 0 is off."""
    beta1: Decay = 0.9
    """AdamW's decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW's decay of the second moment. Where it is not written and `aggregation.rule` is `auto`, the value that was
    measured with the chosen server optimizer (`crossfed check` shows it)."""
    epsilon: Annotated[float, Ge(1e-30)] = 1e-8
    """AdamW's epsilon; not 0: a value without gradient, as of a token that was not seen, would become 0/0."""
    chunked_loss: Literal["auto", "always", "never"] = "auto"
    """Compute output layer and loss in chunks of positions, so that the logits of all never exist; auto: where those of
    a forward pass exceed 8 MiB in float32 on a CPU, 256 MiB on a GPU."""
    clip_norm: NonNegative[float] = 1.0
    """Global gradient norm limit; 0 switches clipping off."""
    proximal: NonNegative[float] = 0.0
    """FedProx's mu (Li et al. 2020, arXiv 1812.06127, eq. 2); 0 is off."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of forward and backward; master weights are float32 always."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the update that travels; what is frozen keeps the dtype that it was received in, but under float32."""
    ranks: Positive[int] = 1
    """Processes per node when no scheduler says; a scheduler's own count wins."""
    threads: NonNegative[int] = 0
    """CPU threads per rank; 0: cores divided by the ranks of the node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks compute on; auto: a GPU where there is one for each."""
    peak_flops: NonNegative[float] = 0.0
    """Most dense operations a second of one device in `compute_dtype`, for the MFU; 0: the maker's figure, where it is
    known."""
    evaluation_sequences: NonNegative[int] = 0
    """Validation blocks per evaluation at most, evenly spread over all (under differential privacy the first units); 0:
    all."""
    encoding: Encoding = "full"
    """How the update travels: whole, or as the difference to the received model (51, 27 or 25 % of bfloat16); not
    `changed`, which is for models (`sending.encoding`). Adapters travel whole."""
    signing_key: Line = ""
    """Private ssh key at the facility that signs its updates' manifests; empty: they are not signed."""
    sparse_density: Share = SPARSE_DENSITY
    """Share of the values that `sparse` sends each round, in 1 + 4 x this many bits a value; the rest is kept, trained
    on and sent later. The default harms nothing measurable in 10 rounds, 0.35 nothing in 30."""
    unsent_share: ShareOrNone = 0.0
    """Share of what `sparseloco` has not sent that training begins with beside the received model; 0: none, as
    published. With two facilities and up to 2.6 million parameters 0.25 gave 2 to 7 % lower perplexity after a hundred
    rounds; with 11 million, and with four facilities, it gave a higher one (tests/bench/log/learning.md)."""
    keep_optimizer: bool = True
    """Keep AdamW's moments at the facility between rounds: 12 to 19 % lower perplexity than beginning them anew at ten
    steps a round, 4 to 9 % at thirty (tests/bench/log/learning.md)."""
    optimizer_state: Literal["auto", "personal", "shared"] = "auto"
    """`shared`: AdamW's second moments are averaged over the facilities between rounds, as row and column means (0.1 %
    of the bytes of a large model); every facility then scales coordinates alike, and unlike facilities' steps add up.
    The first moments stay personal. Needs `keep_optimizer`, and the same value at all facilities. `auto`: shared where
    it was measured to pay: two facilities or more, whole models, a mean as rule."""
    optimizer_state_form: Literal["factors", "blocks", "int8", "full"] = "factors"
    """How shared second moments of matrices travel: `factors`, row and column means; `blocks`, the mean of every 64
    values of a row (1/16 byte a parameter each way); `int8`, a byte a value; `full`, float32. Where it was
    measured, `int8` and `full` lowered perplexity by 0.5 to 0.9 %, and `blocks` raised it by 1.4 %. The same value at
    all facilities that share them."""
    optimizer_state_every: Positive[int] = 1
    """Rounds between two averages of the moments. The same value at all facilities."""
    first_moments: Literal["off", "mean"] = "off"
    """`mean`: first moments (AdamW's, Muon's momentum) are averaged over the facilities between rounds, in bfloat16: 2
    bytes a parameter each way. With AdamW it did not pay where it was measured; Muon's momenta drift apart on unlike
    data (arXiv 2510.27403). Needs `keep_optimizer`; a facility that is `off` takes no part in the mean."""
    drift_correction: bool = False
    """Move every step by the mean of all facilities' walks of the last round minus this facility's own (SCAFFOLD:
    Karimireddy et al. 2020, arXiv 1910.06378, option II), so that unlike facilities drift less apart in long rounds. A
    byte more a parameter travels with each model, and 4 bytes a parameter more are held at the facility. Needs
    `keep_optimizer`, and the same value at all facilities."""
    stall_seconds: Positive[float] = 600.0
    """A rank that hears nothing from its peers for so long ends the job."""
    sync: SyncSettings = field(default_factory=SyncSettings)
    """How replicas inside the facility stay together; without effect where there is one replica."""
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    """Layout of the model over the facility's ranks; other facilities may have another."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters instead of the whole model."""
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    """How preferences are learned; without effect for other tasks."""
    images: ImageSettings = field(default_factory=ImageSettings)
    """How images are augmented; without effect for other tasks."""
    freeze: list[Pattern] = field(default_factory=list)
    """Parameters that stay as received: shell patterns over their names, for instance `*.layers.[0-3].*`. None of
    adapters, of which `lora.targets` says where they are."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """When a round stops early, and how much memory it may use."""
    tracker: Line = ""
    """Where to log steps, by accelerate's name of it (tensorboard, wandb, ...), if it is installed; empty: nowhere."""
    trace: bool = False
    """Write a Chrome trace of the first steps beside the state."""

    def __post_init__(self) -> None:
        if self.lora.quantize_base != "none" and self.layout.compile:
            raise ConfigurationError(
                f"layout.compile is true beside lora.quantize_base {self.lora.quantize_base!r}: compiled steps of "
                "layers in 4 bits were never compared with plain ones; leave one of both out"
            )
        if self.encoding != FULL and declared_codec(self.encoding).lossless:
            raise ConfigurationError(
                f"encoding is {self.encoding!r}, which is for models alone (sending.encoding): of an update nearly "
                "every float32 value differs from the received model's, and nothing would be smaller"
            )
        if self.encoding != "full" and self.export_dtype != "float32":
            raise ConfigurationError(
                f"encoding is {self.encoding!r} with export_dtype {self.export_dtype!r}: a difference needs "
                "export_dtype 'float32' (it does not travel, and half precision would round small steps away before "
                "they are encoded)"
            )
        entry = OPTIMIZERS.get(self.optimizer, "optimizer")
        entry.values(self.optimizer_parameters, "optimizer_parameters")
        if self.optimizer_state == "shared" and not entry.shares_second_moments:
            raise ConfigurationError(
                f"optimizer_state is 'shared' with optimizer {self.optimizer!r}, which keeps no second moment of each "
                "value; expected 'personal' or 'auto', or optimizer 'adamw' or 'muon'"
            )
        if self.optimizer_state == "shared" and not self.keep_optimizer:
            raise ConfigurationError(
                "optimizer_state is 'shared' with keep_optimizer false: moments that are not kept cannot be shared; "
                "set keep_optimizer to true, or optimizer_state to 'personal'"
            )
        if self.preference.reference == BENEATH and not self.lora.rank:
            raise ConfigurationError(
                f"preference.reference is {BENEATH!r} without lora: there is no model beneath adapters; expected a "
                "path, or none"
            )
        if self.first_moments == "mean":
            check_first_moments(self)
        if self.drift_correction:
            check_drift_correction(self)

    @property
    def travelling_moments(self) -> bool:
        """Whether moments travel value by value."""
        return self.first_moments == "mean" or (
            self.optimizer_state == "shared" and self.optimizer_state_form != "factors"
        )

    def sends_moments(self, round: int) -> bool:
        """Whether moments are averaged after a round, counted from 0."""
        return (round + 1) % self.optimizer_state_every == 0


def check_first_moments(training: TrainingSettings) -> None:
    """Raise `ConfigurationError`, with the key, where first moments cannot be averaged."""
    if not OPTIMIZERS.get(training.optimizer).first_moments:
        raise ConfigurationError(
            f"first_moments is 'mean' with optimizer {training.optimizer!r}, which keeps no mean of gradients; "
            "expected 'off', or optimizer adamw or muon",
            key="first_moments",
        )
    if not training.keep_optimizer:
        raise ConfigurationError(
            "first_moments is 'mean' with keep_optimizer false: moments that are not kept cannot be averaged; set "
            "keep_optimizer to true, or first_moments to 'off'",
            key="first_moments",
        )


def check_drift_correction(training: TrainingSettings) -> None:
    """Raise `ConfigurationError`, with the key, for what excludes the correction of drift at one facility."""
    beside = "beside drift_correction true"
    if not training.keep_optimizer:
        raise ConfigurationError(
            f"keep_optimizer is false {beside}: the facility's own walk is kept with the optimizer's state; expected "
            "true",
            key="keep_optimizer",
        )
    if training.sync.policy != "allreduce":
        raise ConfigurationError(
            f"sync.policy is {training.sync.policy!r}, expected 'allreduce' {beside}: replicas that take steps of "
            "their own have no common sum of learning rates",
            key="sync.policy",
        )
    if training.lora.trained_rank:
        raise ConfigurationError(
            f"lora.trained_rank is {training.lora.trained_rank}, expected 0 {beside}: components that other facilities "
            "train would be corrected towards one that stands still",
            key="lora.trained_rank",
        )


def check_differential(training: TrainingSettings, *, dataset_card: bool = False) -> None:
    """Raise `ConfigurationError`, with the key, for what differential privacy excludes."""
    check_layout(training.layout, ranks=training.ranks)
    private = "with privacy.differential"
    if training.sync.policy != "allreduce":
        raise ConfigurationError(
            f"sync.policy is {training.sync.policy!r}, expected 'allreduce' {private}: the noise is calibrated for one "
            "sum over all replicas in every step",
            key="sync.policy",
        )
    if training.compute_dtype == "float16":
        raise ConfigurationError(
            f"compute_dtype is 'float16', expected 'bfloat16' or 'float32' {private}: float16 skips the steps whose "
            "gradients overflow, and which do is known from single records",
            key="compute_dtype",
        )
    if training.lora.parameters:
        raise ConfigurationError(
            f"lora.parameters is {training.lora.parameters}, expected none {private}: peft changes the weights of "
            "experts in every forward pass, and gradients of single records were never verified through that",
            key="lora.parameters",
        )
    if training.lora.quantize_base != "none":
        raise ConfigurationError(
            f"lora.quantize_base is {training.lora.quantize_base!r}, expected none {private}: gradients of single "
            "records were never verified through layers in 4 bits",
            key="lora.quantize_base",
        )
    if training.micro_batch_sequences > training.batch_sequences:
        raise ConfigurationError(
            f"micro_batch_sequences is {training.micro_batch_sequences}, more than batch_sequences "
            f"({training.batch_sequences}); lower it, or raise batch_sequences",
            key="micro_batch_sequences",
        )
    if dataset_card:
        raise ConfigurationError(
            "public.dataset_card holds counts and digests of the dataset, which are not noised: expected false "
            f"{private}",
            key="public.dataset_card",
        )


def check_masked(training: TrainingSettings, *, step_norms: bool) -> None:
    """Raise `ConfigurationError`, with the key, for settings that reveal figures of a single update beside masks."""
    given = [
        (step_norms, "step_norms", "the norm of each tensor's step is stated beside the update"),
        (training.drift_correction, "training.drift_correction", "the length of each walk is in the report"),
    ]
    for on, key, what in given:
        if on:
            raise ConfigurationError(
                f"{key} is true beside masking, expected false: {what}, which masks hide from the coordinator", key=key
            )


@validated(frozen=True, kw_only=True)
class FacilitySettings:
    """The file `workflow/facilities/<name>.json` that travels to one facility."""

    federation: Name
    facility: Name
    rounds: int
    """Rounds of the whole federation: the learning-rate schedule spans them."""
    seed: int
    """The federation's seed; the trainer derives its own from (seed, round, facility)."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Which program trains."""
    include: list[Pattern] = field(default_factory=list)
    """Glob patterns of the tensors that are federated (`aggregation.include`); none: all."""
    exclude: list[Pattern] = field(default_factory=list)
    """Glob patterns of tensors that are not averaged: they stay personal to this facility and never travel."""
    evaluation: FacilityEvaluation = field(default_factory=FacilityEvaluation)
    """Tasks to evaluate the received model on, and data that no facility trains on."""
    dataset_card: bool = False
    """Report counts and digests of the dataset with every update, so that they can be published."""
    model_encoding: Encoding = "full"
    """How models travel to this facility; other than `full`, it keeps the last two as references."""
    behind: NonNegative[int] = 0
    """Rounds that another facility, which may share the work directory, can be behind where rounds do not wait."""
    most_steps: NonNegative[int] = 0
    """Most optimizer steps that the model of a round may ask for; 0: rounds have `training.steps`, whatever it asks."""
    step_norms: bool = False
    """State the norm of every update's step beside it, for a coordinator that clips and so reads updates once."""
    masking: MaskingSettings | None = None
    """Secure aggregation; absent: updates travel as they are."""
    differential: DifferentialSettings | None = None
    """Differential privacy of the training; absent: none."""
    format: int = FORMAT

    @property
    def norms_of_whole(self) -> bool:
        """Whether the program that trains states the norm of its step; of a difference, its encoding states it."""
        return self.step_norms and self.training.encoding == "full"

    def __post_init__(self) -> None:
        if self.masking is not None:
            check_masked(self.training, step_norms=self.step_norms)
        if self.differential is not None:
            check_differential(self.training, dataset_card=self.dataset_card)
            if self.most_steps:
                raise ConfigurationError(
                    f"most_steps is {self.most_steps} beside differential: noise is chosen for training.steps in every "
                    "round; expected 0",
                    key="most_steps",
                )


def describe_codecs() -> list[dict[str, Any]]:
    """What each delta codec declares, with defaults and texts of the settings it uses, for documentation."""
    return with_settings(CODECS.describe(), TrainingSettings)


def read_settings(kind: type[T], path: Path, *, newest: int, advice: str) -> T:
    """Read a rendered JSON file into dataclass `kind`; a `format` above `newest` is refused with `advice`.

    Raises `ConfigurationError`.
    """
    raw = read_values(path, most_bytes=MOST_BYTES)
    check_format(raw, newest, file=path, update=advice)
    return parse_dataclass(kind, raw, file=path, update=advice)


def read_facility_settings(path: Path) -> FacilitySettings:
    """Read the staged settings file; raises `ConfigurationError`."""
    return read_settings(FacilitySettings, path, newest=FORMAT, advice="update CrossFed at this facility")
