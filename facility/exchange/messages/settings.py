"""Training settings of one facility: written by `crossfed render`, staged with every round, read by the trainer."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LayoutSettings, LimitSettings, LoraSettings
from facility.exchange.messages.sync import SyncSettings

FORMAT = 1
T = TypeVar("T")
Encoding = Literal["full", "delta-int8", "delta-int4", "sparse"]
SPARSE_DENSITY = 0.75
"""Share of the values that `sparse` sends, unless told."""
"""A whole checkpoint, or the difference to one that the receiver holds (`facility.exchange.checkpoints.delta`)."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a facility does in one round. Every field may stand under `training:` in `workflow/federation.yml`."""

    steps: int = 100
    """Optimizer steps in one round."""
    batch_sequences: int = 8
    """Sequences (blocks) per optimizer step over the whole facility."""
    micro_batch_sequences: int = 0
    """Sequences per forward pass and rank; 0: as many as the batch gives each rank."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    minimum_learning_rate_ratio: float = 0.1
    """Learning rate at the end of the federation as a share of the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape over the whole federation (all rounds), after one warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up, once for the whole federation."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    chunked_loss: Literal["auto", "always", "never"] = "auto"
    """Compute output layer and loss in chunks of positions, so that the logits of all never exist; auto: where those of
    a forward pass exceed 8 MiB in float32 on a CPU, 256 MiB on a GPU."""
    clip_norm: float = 1.0
    """Global gradient norm limit; 0 switches clipping off."""
    proximal: float = 0.0
    """FedProx's mu (Li et al. 2020, arXiv 1812.06127, eq. 2); 0 is off."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of forward and backward; master weights are float32 always."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the update that travels."""
    ranks: int = 1
    """Processes per node when no scheduler says; a scheduler's own count wins."""
    threads: int = 0
    """CPU threads per rank; 0: cores divided by the ranks of the node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_flops: float = 0.0
    """Most dense operations a second of one device in `compute_dtype`, for the MFU; 0: the maker's figure, where it is known."""
    evaluation_sequences: int = 0
    """At most so many validation blocks per evaluation; 0: all."""
    encoding: Encoding = "full"
    """How the update travels: whole, or as the difference to the received model (51, 27 or 25 % of bfloat16)."""
    signing_key: str = ""
    """Private ssh key at the facility that signs its updates' manifests; empty: they are not signed."""
    sparse_density: float = SPARSE_DENSITY
    """Share of the values that `sparse` sends each round, in 1 + 4 x this many bits a value; the rest is kept, trained on and
    sent later. The default harms nothing measurable in 10 rounds, 0.35 nothing in 30."""
    keep_optimizer: bool = True
    """Keep AdamW's moments at the facility between rounds: 12 to 19 % lower perplexity than beginning them anew at ten
    steps a round, 4 to 9 % at thirty (tests/bench/README.md)."""
    stall_seconds: float = 600.0
    """A rank that hears nothing from its peers for so long ends the job."""
    sync: SyncSettings = field(default_factory=SyncSettings)
    """How replicas inside the facility stay together; without effect where there is one replica."""
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    """How the model lies over the facility's ranks; other facilities may lay it out differently."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters instead of the whole model."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as received: shell patterns over their names, for instance `*.layers.[0-3].*`."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    tracker: str = ""
    """Where to log steps, by accelerate's name of it (tensorboard, wandb, ...), if it is installed; empty: nowhere."""
    trace: bool = False
    """Write a Chrome trace of the first steps beside the state."""

    def __post_init__(self) -> None:
        positive = {
            "steps": self.steps,
            "batch_sequences": self.batch_sequences,
            "ranks": self.ranks,
            "learning_rate": self.learning_rate,
            "stall_seconds": self.stall_seconds,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigurationError(f"{name} is {value}, expected more than 0")
        for name in (
            "micro_batch_sequences",
            "warmup_steps",
            "weight_decay",
            "clip_norm",
            "proximal",
            "threads",
            "peak_flops",
            "evaluation_sequences",
        ):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 < self.sparse_density <= 1:
            raise ConfigurationError(f"sparse_density is {self.sparse_density}, expected more than 0 and at most 1")
        if self.encoding != "full" and self.export_dtype != "float32":
            raise ConfigurationError(
                f"encoding is {self.encoding!r} with export_dtype {self.export_dtype!r}: a difference needs export_dtype "
                "'float32' (it does not travel, and half precision would round small steps away before they are encoded)"
            )


@dataclass(frozen=True, kw_only=True)
class FacilitySettings:
    """The file `workflow/facilities/<name>.json` that travels to one facility."""

    federation: str
    facility: str
    rounds: int
    """Rounds of the whole federation: the learning-rate schedule spans them."""
    seed: int
    """The federation's seed; the trainer derives its own from (seed, round, facility)."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    include: list[str] = field(default_factory=list)
    """Glob patterns of the tensors that are federated (`aggregation.include`); none: all."""
    exclude: list[str] = field(default_factory=list)
    """Glob patterns of the tensors that are not: they stay personal to this facility and never travel."""
    model_encoding: Encoding = "full"
    """How models travel to this facility; other than `full`, it keeps the last two as references."""
    format: int = FORMAT


def from_mapping(kind: type[T], raw: Any, *, where: str = "", file: Path | str | None = None) -> T:
    """Build dataclass `kind` from a mapping: unknown keys and wrong types raise `ConfigurationError` naming the key."""
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{where or kind.__name__} is {raw!r:.60}, expected a mapping", file=file, key=where)
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [f.name for f in fields]
    values = {}
    for key, value in raw.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigurationError(
                f"unknown key {name!r}; {hint}known keys are {', '.join(known)}", file=file, key=name
            )
        values[key] = _checked(hints[key], value, name, file)
    missing = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING and f.name not in raw]
    if missing:
        raise ConfigurationError(f"{where or kind.__name__} lacks {', '.join(missing)}", file=file, key=where)
    try:
        return kind(**values)
    except ConfigurationError as error:
        # A dataclass that refuses a value names the field, or begins its message with the field's name.
        first = error.message.split(maxsplit=1)[0]
        field = error.key or (first if first in known else "")
        key = ".".join(filter(None, [where, field]))
        raise ConfigurationError(f"{where}: {error.message}" if where else error.message, file=file, key=key) from None


def _checked(hint: Any, value: Any, name: str, file: Path | str | None) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        rest = [a for a in arguments if a is not NoneType]
        for candidate in rest[:-1]:
            try:
                return _checked(candidate, value, name, file)
            except ConfigurationError:
                continue
        return _checked(rest[-1], value, name, file)
    if origin is Literal:
        if value not in arguments:
            raise ConfigurationError(
                f"{name} is {value!r}, expected one of {', '.join(map(repr, arguments))}", file=file
            )
        return value
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where=name, file=file)  # type: ignore[arg-type]
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigurationError(f"{name} is {value!r:.60}, expected a list", file=file, key=name)
        items = (
            [_checked(arguments[0], item, f"{name}[{number}]", file) for number, item in enumerate(value)]
            if arguments
            else list(value)
        )
        return origin(items)
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise ConfigurationError(f"{name} is {value!r:.60}, expected a mapping", file=file, key=name)
        return dict(value)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigurationError(f"{name} is {value!r:.60}, expected {hint.__name__}", file=file, key=name)
    return value


def read_settings(kind: type[T], path: Path, *, newest: int, advice: str) -> T:
    """Read a rendered JSON file into dataclass `kind`; a `format` above `newest` is refused with `advice`.

    Raises `ConfigurationError`.
    """
    try:
        raw = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot be read: {error}", file=path) from None
    settings = from_mapping(kind, raw, file=path)
    found = getattr(settings, "format")  # noqa: B009 (every rendered dataclass has one)
    if found > newest:
        raise ConfigurationError(f"format {found} is newer than {newest}: {advice}", file=path)
    return settings


def read_facility_settings(path: Path) -> FacilitySettings:
    """Read the staged settings file; raises `ConfigurationError`."""
    return read_settings(FacilitySettings, path, newest=FORMAT, advice="update CrossFed at this facility")
