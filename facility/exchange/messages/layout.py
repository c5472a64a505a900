"""How one facility lays a model over its ranks, what it trains of it, and when it stops: parts of `training:`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from facility.exchange.errors import ConfigurationError
from facility.exchange.one_of import one_of
from facility.exchange.schedules.registry import SCHEDULES
from facility.exchange.text import Line, number_of
from facility.exchange.validation import AtLeastOne, NonNegative, Positive, validated

QUANTIZES = "bitsandbytes>=0.50"
"""What a facility whose base is quantised needs beside its other packages, as pip names it."""
QUANTIZED_BLOCK = 64
"""Weights of a quantised base that share a scale; QLoRA's and bitsandbytes' own number."""
SCALES_BLOCK = 256
"""Scales that share one of their own in double quantization."""

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]


@validated(frozen=True, kw_only=True)
class LayoutSettings:
    """Replicas x stages x shards; ranks = their product. Without any key: plain FSDP over all ranks."""

    sharding: Sharding = "FULL_SHARD"
    """FSDP's names: FULL_SHARD frees a block's weights between forward and backward, SHARD_GRAD_OP keeps them;
    HYBRID_SHARD and _HYBRID_SHARD_ZERO2 do so within a node with a replica per node; NO_SHARD: every rank a replica
    (torch then warns of `find_unused_parameters` once on each: weights that a step does not reach ask for it)."""
    replicas: NonNegative[int] = 0
    """Copies of the model; 0: as `sharding` implies."""
    stages: AtLeastOne[int] = 1
    """Ranks that one pipeline passes through."""
    shards: NonNegative[int] = 0
    """With a plan: ranks that share one device of it by FSDP; 0: one. Without: what replicas and stages leave over."""
    virtual_stages: AtLeastOne[int] = 1
    """Chunks of the model that a rank of the pipeline holds; more than 1 with interleaved schedules."""
    units: list[list[int]] = field(default_factory=list)
    """[first, end) of every chunk over units 0 = embedding, 1..L = blocks, L+1 = head; empty: even cuts."""
    schedule: Annotated[str, one_of(SCHEDULES.built_in)] = "1f1b"
    """Order of forward and backward passes in a pipeline; without effect with one stage."""
    plan: Line = ""
    """A plan.json at the facility: absolute, `~/...`, or relative to CrossFed's directory there; for a local facility
    relative to federation.yml. It replaces replicas, stages, units, schedule and micro-batches."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: a block keeps its input only and runs again in backward; selective: it also keeps matrix products."""
    offload: bool = False
    """Keep shards in CPU memory between uses (GPU only; without effect where no ranks share a model by FSDP)."""
    compile: bool = False
    """Compile every block with torch.compile."""

    def __post_init__(self) -> None:
        if not SCHEDULES.get(self.schedule, "schedule").interleaved and self.virtual_stages > 1:
            raise ConfigurationError(
                f"virtual_stages is {self.virtual_stages} with schedule {self.schedule!r}; "
                "use interleaved_1f1b or interleaved_zero_bubble, or 1"
            )


@validated(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), injected by peft; then only adapters travel."""

    rank: NonNegative[int] = 0
    """Rank of an adapter; 0: off, the whole model is trained."""
    trained_rank: NonNegative[int] = 0
    """Leading components of each adapter that this facility trains, the others stay as received; 0: all. Facilities
    may differ in it while `rank` is the same for all."""
    freeze_a: bool = False
    """Train B alone, over the A that the federation began with, the same at all facilities: the mean of their factors
    is then exactly the mean of B A (FFA-LoRA, Sun et al. 2024, arXiv 2403.12313)."""
    alpha: Positive[float] = 16.0
    """Scale: an adapter adds alpha / rank * B A."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that an adapter's input is dropped in training."""
    base: Line = ""
    """The base model at the facility (as `layout.plan`), when adapters alone travel both ways; empty: the received
    model."""
    base_sha256: Line = ""
    """Digest of the base's tensor files (`python -m facility.base_model DIR`), the same for all facilities: a job that
    finds other weights trains nothing. Empty: not compared."""
    targets: list[str] = field(default_factory=list)
    """Ends of the names of the linear layers that get one; empty: every linear layer of the blocks."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732): higher ranks do not learn ever less."""
    dora: bool = False
    """Also train the length of each output's row of W + scale B A (DoRA, Liu et al. 2024, arXiv 2402.09353)."""
    parameters: list[str] = field(default_factory=list)
    """Ends of the names of fused experts that get an adapter each, such as `experts.gate_up_proj` and
    `experts.down_proj` (peft's `target_parameters`); empty: none."""
    modules_to_save: list[str] = field(default_factory=list)
    """Ends of the names of modules that are trained whole and travel with the adapters, such as `lm_head`; empty: the
    head of a classifier (`score`, `classifier`), as peft does, and nothing else."""
    quantize_base: Literal["none", "nf4", "fp4"] = "none"
    """QLoRA: hold the frozen linear layers of the blocks in 4 bits on every rank, as normal floats (nf4) or floats
    (fp4) of bitsandbytes, which the facility needs for it. Facilities may differ in it."""
    double_quantization: bool = True
    """With `quantize_base`: hold the scales of a quantised base in 8 bits, not in 32."""

    @property
    def base_bytes(self) -> float:
        """Bytes that a weight of a frozen linear layer of the blocks takes, with its share of the scales."""
        if self.quantize_base == "none":
            return 4.0
        scale = 1 + 4 / SCALES_BLOCK if self.double_quantization else 4
        return 0.5 + scale / QUANTIZED_BLOCK

    def __post_init__(self) -> None:
        if self.trained_rank > self.rank:
            raise ConfigurationError(
                f"lora.trained_rank is {self.trained_rank}, expected at most lora.rank, which is {self.rank}"
            )
        self._check_quantized()
        if self.base_sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.base_sha256):
            raise ConfigurationError(
                f"lora.base_sha256 is {self.base_sha256!r}, expected 64 hexadecimal digits "
                "(`python -m facility.base_model DIR` prints them)"
            )
        for key, value in (("dora", self.dora), ("dropout", self.dropout), ("trained_rank", self.trained_rank)):
            if value and self.parameters:
                raise ConfigurationError(
                    f"lora.{key} is {value} beside lora.parameters {self.parameters}: peft adapts fused experts by "
                    "plain factors of all of them at once, without dropout or magnitudes; leave one of both out"
                )
        if odd := [name for name in self.parameters if "." not in name]:
            raise ConfigurationError(
                f"lora.parameters names {odd[0]!r}; expected the module and the parameter, such as 'experts.down_proj'"
            )

    def _check_quantized(self) -> None:
        """Raise `ConfigurationError` for keys beside `quantize_base` that it excludes."""
        if self.quantize_base == "none":
            return
        for key, wrong, why in (
            ("rank", not self.rank, "weights in 4 bits cannot be trained, only adapters beside them; set lora.rank"),
            ("dora", self.dora, "DoRA's magnitudes begin as the norms of unquantised rows; leave one of both out"),
            ("parameters", bool(self.parameters), "fused experts stay in float32; leave one of both out"),
        ):
            if wrong:
                raise ConfigurationError(
                    f"lora.{key} is {getattr(self, key)!r} beside lora.quantize_base {self.quantize_base!r}: {why}"
                )


def of_adapters(frozen: Sequence[str]) -> str:
    """What is wrong with a `training.freeze` that matches these tensors of adapters."""
    return (
        f"matches {number_of(len(frozen), 'tensor')} of the adapters, such as {frozen[0]!r}: an adapter is trained and "
        "sent whole; what of the model has adapters, training.lora.targets says"
    )


@validated(frozen=True, kw_only=True)
class LimitSettings:
    """When a round stops early, and what is too much."""

    seconds: NonNegative[float] = 0.0
    """Time for one attempt at a round, from the start of the process; then state is saved and the exit code is 85.
    0: no limit."""
    stop_after: NonNegative[int] = 0
    """Stop so once this many steps of the round are done (for rehearsals); 0: no limit."""
    memory_bytes: NonNegative[int] = 0
    """Memory that a rank may use; 0: what the machine has."""
    bad_losses: AtLeastOne[int] = 5
    """Steps with a loss or gradient that is not finite are skipped; this many in a row end the round with an error."""
    save_every: NonNegative[int] = 0
    """Also save state every this many steps, against a crash without a warning; 0: only when asked to stop."""
