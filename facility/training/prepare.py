"""The first stages of a round: the process joins its ranks, the layout is chosen, the model is built and loaded."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import torch

from facility.exchange.checkpoints.adapters import PREFIX, is_adapter
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.layouts import refusal_of_router_loss, refusal_of_shards
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.memory.chunks import WHOLE_LOGITS
from facility.exchange.messages.manifest import check_digest
from facility.exchange.privacy.accounting import accounting_library
from facility.exchange.seeds import derive_seed
from facility.training import account, memory
from facility.training.batch_norm import check_variances
from facility.training.begin_adapters import check_scale, load_adapters
from facility.training.data.inputs import RoundInputs
from facility.training.data.loader import DataLoader
from facility.training.engine import Engine
from facility.training.half_base import hold_in_half
from facility.training.head import HeadChoice, choose_head
from facility.training.monitor.clock import Clock
from facility.training.parallel import arrange
from facility.training.parallel.arrange import Layout
from facility.training.parallel.assemble import Assembly, assemble_part, build_meta_model
from facility.training.parallel.sharder import Sharder
from facility.training.parallel.split import inspect_model
from facility.training.parallel.structure import ModelStructure
from facility.training.privacy.micro_batches import layout_of_records
from facility.training.processes.ranks import Ranks, agree_on_failure, from_environment
from facility.training.processes.rendezvous import join_ranks
from facility.training.replicas import order_of
from facility.training.request import RoundRequest
from facility.training.shards import load_shards

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the round is laid over the ranks, and this rank's share of the data."""

    layout: Layout
    head: HeadChoice
    structure: ModelStructure | None
    """Where the model's units are; None where no stage is cut."""
    loader: DataLoader


def prepare_ranks(request: RoundRequest) -> Ranks | None:
    """Join the other ranks and make torch deterministic; None where the plan leaves this process idle."""
    training = request.training
    ranks = from_environment(training.device)
    if request.plan is not None:
        remapped = arrange.remapped_rank(ranks, request.plan, training.layout.shards or 1)
        if remapped is None:
            return None
        ranks = remapped
    join_ranks(ranks, threads=training.threads, timeout_seconds=training.stall_seconds)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(derive_seed(request.settings.seed, "round", request.round, request.settings.facility))
    return ranks


def choose_setup(request: RoundRequest, inputs: RoundInputs, ranks: Ranks) -> Setup:
    """Lay the model and the batch over the ranks. Raises `ConfigurationError` where they do not fit."""
    training, task, tokens = request.training, inputs.task, inputs.positions
    if request.plan is not None:
        layout = arrange.layout_of_plan(request.plan, ranks, training, blocks=inputs.blocks, block_tokens=tokens)
    else:
        layout = arrange.layout_of_settings(ranks, training, blocks=inputs.blocks, block_tokens=tokens)
    if reason := refusal_of_router_loss(inputs.config, pipeline=bool(layout.units), private=False):
        raise ConfigurationError(reason)
    attention = inputs.attention.name
    whole = inputs.dataset.manifest.task in WHOLE_LOGITS or request.settings.differential is not None
    head = choose_head(
        dataclasses.replace(training, chunked_loss="never") if whole else training,
        inputs.config,
        task.factory,
        attention,
        sequences=layout.shape.micro_batch_sequences,
        tokens=tokens,
        device=ranks.device.type,
    )
    pixels = inputs.dataset.manifest.pixels
    image = pixels.shape if pixels is not None else None
    structure = inspect_model(inputs.config, task.factory, attention, tokens, image=image) if layout.units else None
    seed, sequences = request.settings.seed, len(inputs.dataset.split("train"))
    loader = DataLoader(
        inputs.dataset,
        task,
        layout.shape,
        seed=seed,
        facility=request.settings.facility,
        data_rank=layout.grid.data_rank(ranks.rank),
        data_ranks=layout.grid.data_ranks,
        evaluation_sequences=training.evaluation_sequences,
        apart=order_of(layout, ranks, sequences=sequences, seed=seed),
    )
    return Setup(layout=layout, head=head, structure=structure, loader=loader)


def build_engine(request: RoundRequest, inputs: RoundInputs, setup: Setup, ranks: Ranks, clock: Clock) -> Engine:
    """This rank's part of the received model in memory, with its optimizer."""
    training, layout, structure = request.training, setup.layout, setup.structure
    with agree_on_failure(ranks):
        skeleton = build_meta_model(inputs.config, inputs.task, inputs.attention, training)
        if layout.sharded and (reason := refusal_of_shards(skeleton, adapters=bool(training.lora.rank))):
            raise InputError(reason)
        if request.settings.differential is None and (halved := hold_in_half(skeleton, inputs.checkpoint, training)):
            log.info("%d frozen layers are held in %s, as they are stored", halved, training.compute_dtype)
        rank = memory.rank_layout(layout, ranks, setup.head.rows, training)
        if request.settings.differential is not None:
            rank = layout_of_records(rank, skeleton, training, ranks=ranks.world)
            accounting_library()  # 50 MB of libraries, beside which the model comes
        needed = memory.predicted_bytes(skeleton, structure, rank, training, inputs.config)
        memory.check_memory(needed, ranks, training)
        expected = account.resident_bytes(ranks) + sum(needed.values())
    held = assemble_part(
        skeleton,
        inputs.task,
        inputs.checkpoint,
        Sharder(layout, ranks, training, clock),
        structure=structure,
        chunk_rows=setup.head.rows,
    )
    with agree_on_failure(ranks):
        if request.round == 0 and training.lora.rank and any(map(is_adapter, inputs.received.tensors)):
            check_scale(inputs.received.directory, training.lora)
        load_weights(held, inputs, inputs.received, request.settings.seed)
        verify_loaded(inputs)
        check_variances(held.statistics)
    engine = Engine(held, layout, ranks, training, clock)
    engine.predicted_memory_bytes = expected
    return engine


def load_weights(held: Assembly, inputs: RoundInputs, received: Checkpoint, seed: int) -> None:
    """Fill what this rank holds from the model `received`; frozen weights below adapters from the base.

    Raises `CheckpointError`.
    """
    names, adapters = held.names, any(part.name.startswith(PREFIX) for part in held.parts)
    weights = [part for part in held.parts if not part.name.startswith(PREFIX)]
    base = received if not adapters and inputs.checkpoint is inputs.received else inputs.checkpoint
    hashed = {digest.path: digest for digest in inputs.unverified.values()} if base is inputs.received else None
    load_shards([*weights, *held.buffers, *held.quantized], base, names.conversion, hashed=hashed)
    if adapters:
        log.info("%s", load_adapters(held.parts, received, base, names, seed, trained=held.shapes))


def verify_loaded(inputs: RoundInputs) -> None:
    """Compare what `load_weights` has read of the received model with its manifest; what it did not read is read here.

    Raises `ManifestError`.
    """
    for name, digest in inputs.unverified.items():
        assert inputs.base is not None
        check_digest(inputs.received.directory, inputs.base, name, digest.finish())
    inputs.unverified.clear()
