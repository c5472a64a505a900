"""What a facility keeps between rounds: the optimizer's state and the position in its data, one directory a round.

`round-N` is written whole when round N ends. Round N reads the newest of an earlier round, which is `round-(N-1)`
unless the facility sat out that one, so doing round N again, after the coordinator died for instance, starts from the
same state and ends in the same bytes. Two are kept. Tensors lie whole in safetensors files, so a later round may run on
another number of ranks or in another layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import CheckpointError, ConfigurationError, NewerFormat
from facility.exchange.files import present
from facility.exchange.files.checksum import Checksum
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.json_values import values_in
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.validation import check_format, parse_dataclass, validated
from facility.rounds.kept import OF_A_ROUND, latest_before
from facility.rounds.sealed import NEW, OLD, discard_sealed, replace_directory, write_seal
from facility.training.engine import Engine
from facility.training.optimizers.protocol import Optimizer, Shape
from facility.training.processes.ranks import Ranks, agree_on_failure, broadcast
from facility.training.shards import LocalShard, load_shards
from facility.training.state.save import create_files, plan_files, write_shards
from facility.training.state.step_counts import COUNT, count_alike, counts_of, decay_alike, fill_counts

FORMAT = 1
PAUSE_FORMAT = 2
NAME = "state.json"
PAUSED = "paused"
Shapes = dict[str, tuple[int, ...]]
"""Every trained parameter of the whole model, by name on disk."""


@validated(frozen=True, kw_only=True)
class RoundState:
    """`state.json`."""

    federation: str
    facility: str
    seed: int
    round: int
    position: int
    """Sequences consumed since round 0."""
    optimizer_steps: int
    """Steps that the moments have seen; 0 when there are none."""
    sync: list[str] = dataclasses.field(default_factory=list)
    """Vectors over the parameters that the policy between replicas keeps (DiLoCo's outer momentum)."""
    optimizer: str = "adamw"
    """Whose state it is."""
    betas: list[float] | None = None
    """Decays (beta1, beta2) of AdamW's moments; None: an earlier version did not say."""
    loss_scale: float = 0.0
    """That fp16 ended the round with; 0: it was of another dtype, or an earlier version did not say."""
    steady: int = 0
    """Steps in a row that did not overflow since the loss scale changed."""
    format: int = FORMAT


@validated(frozen=True, kw_only=True)
class ReplicaProgress:
    """How far replicas that go at one pace have come in an interrupted round."""

    steps: int
    """Steps done of this round."""
    position: int
    optimizer_steps: int
    losses: list[float]
    """Loss of every step so far; -1 for one that was skipped, or had nothing to predict."""
    scale: float
    """fp16 loss scale."""
    skipped: int
    samples: float
    """What the policy between replicas has counted."""
    rates: float = 0.0
    """Sum of the learning rates of the steps, where drift is corrected."""
    sequences: int = -1
    """Sequences that the steps were taken on; -1: an earlier version did not say."""
    steady: int = 0
    """Steps in a row that did not overflow since the loss scale changed."""
    bad_in_a_row: int = 0
    """Skipped steps up to here that a lower loss scale does not explain."""


@validated(frozen=True, kw_only=True)
class MidRoundCheckpoint:
    """`state.json` of `paused`: progress of an interrupted round."""

    federation: str
    facility: str
    seed: int
    round: int
    base_sha256: str
    """Digest of the received model: a pause is of use for the same model only."""
    loss_received: float
    accuracy_received: float | None = None
    seconds: float
    """Training time so far."""
    interruptions: int
    replicas: list[ReplicaProgress]
    """One for each replica that has weights of its own; one in all where every replica makes the same steps."""
    sync: list[str]
    """Vectors over the parameters that the policy between replicas keeps."""
    optimizer: str = "adamw"
    """Whose state it is."""
    betas: list[float] | None = None
    """Decays (beta1, beta2) of AdamW's moments; None: an earlier version did not say."""
    compute_dtype: str = ""
    """Dtype that the loss scale goes with; empty: an earlier version did not say."""
    format: int = PAUSE_FORMAT

    def progress_of(self, replica: int, replicas: int) -> ReplicaProgress:
        """Where a replica goes on: at its own place, or, laid out otherwise than before, at the mean of all."""
        if len(self.replicas) == replicas:
            return self.replicas[replica]
        steps = sum(s.steps for s in self.replicas) // len(self.replicas)
        first, position = self.replicas[0], max(s.position for s in self.replicas)
        return dataclasses.replace(
            first,
            steps=steps,
            position=position,
            losses=first.losses[:steps],
            samples=0.0,
            sequences=0 if replica and self.sequences >= 0 else self.sequences,
        )

    @property
    def sequences(self) -> int:
        """Sequences that all replicas have taken their steps on; -1: not known."""
        return max(-1, sum(one.sequences for one in self.replicas))


def read_state(directory: Path, settings: FacilitySettings, round: int) -> tuple[RoundState | None, str]:
    """State that round `round` continues from, which is the newest of an earlier round, or None, and the reason."""
    if round == 0:
        return None, "round 0 starts with a fresh optimizer at the beginning of the data"
    path = latest_before(directory, round)
    if path is None:
        why = f"this facility sat out round {round - 1}, it was moved, or crossfed rewind went back past what it keeps"
        return None, f"{directory} holds no earlier round ({why})"
    return read_state_of(path, settings)


def read_state_of(path: Path, settings: FacilitySettings) -> tuple[RoundState | None, str]:
    """What one round left in its directory `path`, or None, and the reason."""
    if not present.is_file(path / NAME):
        return None, f"{path} is absent (this facility sat out that round, or its state was moved)"
    try:
        raw = values_in(path / NAME)
        check_format(raw, FORMAT, file=path / NAME)
        state = parse_dataclass(RoundState, raw, file=path / NAME)
    except NewerFormat as error:
        raise CheckpointError(str(error)) from None
    except (OSError, ValueError, ConfigurationError) as error:
        raise CheckpointError(f"{path / NAME} is unreadable: {error}; remove {path} to start afresh") from None
    mine = (settings.federation, settings.facility, settings.seed)
    if (state.federation, state.facility, state.seed) != mine:
        return None, f"{path} belongs to {(state.federation, state.facility, state.seed)}, this run is {mine}"
    if state.optimizer != settings.training.optimizer:
        reason = f"continuing from {path} with new optimizer state: that of {state.optimizer} is of no use here"
        return dataclasses.replace(state, optimizer_steps=0), reason
    return state, f"continuing from {path}"


def moments_of(optimizer: Optimizer, parts: Sequence[LocalShard]) -> list[LocalShard]:
    """What the optimizer keeps, as parts named `KIND.<parameter>`; absent state is made as zeros."""
    return [held for part in parts for held in optimizer.shards(part)]


def pieces_of(parts: Sequence[LocalShard], vectors: dict[str, torch.Tensor]) -> list[LocalShard]:
    """Flat vectors over the parameters held here, as parts named `<vector>.<parameter>` that share their memory."""
    return [
        dataclasses.replace(part, name=f"{kind}.{part.name}", tensor=piece.view(part.tensor.shape))
        for kind, vector in vectors.items()
        for part, piece in zip(parts, vector.split([p.tensor.numel() for p in parts]), strict=True)
    ]


def kept_of(optimizer: Optimizer, vectors: Iterable[str]) -> Callable[[str, Shape], list[tuple[str, Shape]]]:
    """What is stored of a parameter beside its weight: (kind, whole shape) of the optimizer's state and the vectors."""
    own = [*vectors]
    return lambda name, shape: [*optimizer.kept(name, shape).items(), *((kind, shape) for kind in own)]


def lacking(directory: Path, optimizer: Optimizer, shapes: Shapes, *, vectors: Iterable[str], prefix: str = "") -> str:
    """The first tensor that goes with the parameters `shapes` and is not in a state directory in its shape; empty: all
    are. The same on every rank.
    """
    stored, kept = open_checkpoint(directory).tensors, kept_of(optimizer, vectors)
    for name, shape in shapes.items():
        for kind, whole in kept(name, shape):
            entry = stored.get(f"{prefix}{kind}.{name}")
            if entry is None or entry.shape != whole:
                return f"{kind}.{name}"
    return ""


def of_replica(replica: int, parts: Sequence[LocalShard]) -> list[LocalShard]:
    """The shards under the names that the state of one replica has."""
    return [dataclasses.replace(part, name=f"replica-{replica}.{part.name}") for part in parts]


def load_moments(
    directory: Path,
    optimizer: Optimizer,
    parts: Sequence[LocalShard],
    steps: int,
    *,
    betas: Sequence[float] | None,
    replica: int | None = None,
) -> None:
    """Fill the optimizer from a state directory; from a pause, with the moments of one replica.

    `betas`: that the moments were made with (`RoundState.betas`).
    """
    moments, stored = moments_of(optimizer, parts), open_checkpoint(directory)
    load_shards(moments if replica is None else of_replica(replica, moments), stored)
    fill_counts(optimizer, parts, steps, stored, "" if replica is None else f"replica-{replica}.")
    decay_alike(optimizer, parts, betas)


def publish(
    path: Path,
    ranks: Ranks,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    parts: Sequence[LocalShard],
    message: RoundState | MidRoundCheckpoint,
) -> None:
    """Write float32 tensors, of which every rank holds some rows, and `state.json`; replaces `path` atomically.

    Raises `NotWritten` on every rank where a file system refuses one of them; then `path` stays as it is.
    """
    slots, headers = plan_files([(name, "F32", shape) for name, shape in tensors])
    new, hashed = path.with_name(path.name + NEW), None
    with ExitStack() as stack:
        temporary = ""
        with agree_on_failure(ranks):
            if ranks.first:
                path.parent.mkdir(parents=True, exist_ok=True)
                discard_sealed(new)
                temporary = str(stack.enter_context(new_directory(new)))
                hashed = create_files(Path(temporary), slots, headers if tensors else {}, Checksum)
        directory = Path(broadcast(ranks, temporary))
        with agree_on_failure(ranks):
            known = write_shards(directory, slots, parts, hashed=hashed if ranks.world == 1 else None)
        with agree_on_failure(ranks):
            if ranks.first:
                write_json(directory / NAME, dataclasses.asdict(message))
                write_seal(directory, known)
                stack.close()
                replace_directory(path, new)


def save_state(
    directory: Path,
    state: RoundState,
    engine: Engine,
    *,
    vectors: dict[str, torch.Tensor],
    writes: bool,
    needed: int | None = None,
) -> None:
    """Write `round-N`, drop what later rounds cannot need. `writes`: this rank's replica is the one that writes.

    `vectors`: what the policy between replicas keeps, and the walk where drift is corrected; kept where the optimizer
    is. `needed`: an earlier round whose state is kept as well.
    """
    optimizer, shapes = engine.optimizer, engine.assembly.shapes
    tensors, mine = [], []
    if engine.settings.keep_optimizer:
        kept = kept_of(optimizer, vectors)
        count_alike(optimizer, engine.parts, state.optimizer_steps)
        tensors = [(f"{kind}.{name}", whole) for name, shape in shapes.items() for kind, whole in kept(name, shape)]
        held = [*moments_of(optimizer, engine.parts), *pieces_of(engine.parts, vectors)]
        mine = [part for part in held if writes and not part.copy]
    publish(directory / f"round-{state.round}", engine.ranks, tensors, mine, state)
    if engine.ranks.first:
        before = latest_before(directory, state.round)
        begun = state.round if before is None else int(before.name.removeprefix("round-"))
        for other in [*directory.glob("round-*"), *directory.glob("sync-*")]:
            match = OF_A_ROUND.fullmatch(other.name)
            if match and int(match[1]) not in (begun, state.round - 1, state.round, needed):
                discard_sealed(other)


def drop_checkpoint(directory: Path) -> None:
    """Remove the mid-round checkpoint of a round that is complete, its update included."""
    for name in (f"{PAUSED}{NEW}", f"{PAUSED}{OLD}", PAUSED):
        discard_sealed(directory / name)


def save_checkpoint(
    directory: Path,
    pause: MidRoundCheckpoint,
    engine: Engine,
    *,
    vectors: dict[str, torch.Tensor],
    replica: int,
    writes: bool,
) -> None:
    """Write `paused`: master weights, moments and position of every replica in the middle of a round.

    `replica`: this rank's among `pause.replicas`; `writes`: this rank is one that writes it.
    """
    optimizer, parts = engine.optimizer, engine.parts
    kept = kept_of(optimizer, vectors)
    tensors = [
        (f"replica-{number}.{kind}.{name}", whole)
        for number in range(len(pause.replicas))
        for name, shape in engine.assembly.shapes.items()
        for kind, whole in [*kept(name, shape), ("weight", shape), (COUNT, ())]
    ]
    running = weights_of(engine.assembly.statistics)
    tensors += [(f"replica-{number}.{p.name}", p.shape) for number in range(len(pause.replicas)) for p in running]
    mine = []
    if writes:
        mine = [*moments_of(optimizer, parts), *pieces_of(parts, vectors), *weights_of(parts), *running]
        mine += counts_of(optimizer, parts)
    publish(directory / PAUSED, engine.ranks, tensors, of_replica(replica, [p for p in mine if not p.copy]), pause)


def weights_of(parts: Sequence[LocalShard]) -> list[LocalShard]:
    """The shards under the names that weights have in a mid-round checkpoint."""
    return [dataclasses.replace(part, name=f"weight.{part.name}") for part in parts]


def read_checkpoint(
    directory: Path, settings: FacilitySettings, round: int, base_sha256: str
) -> MidRoundCheckpoint | None:
    """What an interrupted attempt at this round left; None when there is none, or it began from another model."""
    file = directory / PAUSED / NAME
    if not present.is_file(file):
        return None
    try:
        raw = values_in(file)
        if isinstance(raw, dict) and raw.get("format") != PAUSE_FORMAT:
            return None
        pause = parse_dataclass(MidRoundCheckpoint, raw, file=file)
    except (OSError, ValueError, ConfigurationError) as error:
        raise CheckpointError(
            f"{file} is unreadable: {error}; remove {file.parent} to start the round afresh"
        ) from None
    mine = (settings.federation, settings.facility, settings.seed, round, base_sha256, settings.training.optimizer)
    found = (pause.federation, pause.facility, pause.seed, pause.round, pause.base_sha256, pause.optimizer)
    same = found == mine
    return pause if same else None


@torch.no_grad()
def load_checkpoint(directory: Path, pause: MidRoundCheckpoint, engine: Engine, *, replica: int, replicas: int) -> None:
    """Put weights and moments back: this replica's own, or, where replicas were others, the mean and the first's."""
    written = len(pause.replicas)
    sources = [replica] if written == replicas else list(range(written))
    steps = pause.progress_of(replica, replicas).optimizer_steps
    load_moments(directory / PAUSED, engine.optimizer, engine.parts, steps, betas=pause.betas, replica=sources[0])
    checkpoint, weights = open_checkpoint(directory / PAUSED), weights_of([*engine.parts, *engine.assembly.statistics])
    load_shards(of_replica(sources[0], weights), checkpoint)
    for part in weights if len(sources) > 1 else ():
        total, other = part.tensor.double(), torch.empty_like(part.tensor)
        for source in sources[1:]:
            load_shards(of_replica(source, [dataclasses.replace(part, tensor=other)]), checkpoint)
            total += other
        part.tensor.copy_(total / len(sources))


def load_vectors(
    directory: Path,
    names: Sequence[str],
    vectors: dict[str, torch.Tensor],
    parts: Sequence[LocalShard],
    *,
    replica: int | None = None,
) -> None:
    """Fill the vectors that the policy between replicas keeps, those that were written."""
    pieces = pieces_of(parts, {name: vector for name, vector in vectors.items() if name in names})
    load_shards(pieces if replica is None else of_replica(replica, pieces), open_checkpoint(directory))
