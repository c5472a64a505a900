"""From a checkpoint's configuration and a grid to what this rank holds, materialised and ready to be loaded."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.layouts import refusal_of_adapters, refusal_of_batch_norms
from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.locks import temporary_place
from facility.exchange.grid import Grid
from facility.exchange.messages.layout import of_adapters
from facility.exchange.messages.settings import TrainingSettings
from facility.training import lora
from facility.training.attention_operations import attention_operations
from facility.training.batch_norm import statistics_names
from facility.training.data.tasks import Task
from facility.training.head import ChunkedHead
from facility.training.model import Attention, Names, build_base_model, names_of
from facility.training.parallel.collectives import time_all_reduce
from facility.training.parallel.compute import Compute, Whole
from facility.training.parallel.sharder import Sharder
from facility.training.parallel.split import Stage
from facility.training.parallel.structure import ModelStructure
from facility.training.processes.groups import group_among
from facility.training.processes.ranks import Ranks
from facility.training.quantized_base import (
    QuantizedShard,
    check_quantized,
    is_quantized,
    quantize_layers,
    quantized_shards,
)
from facility.training.shards import LocalShard, shard_of
from facility.training.weight_operations import weight_operations


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What this rank holds."""

    compute: Compute
    parts: list[LocalShard]
    """Rows of every parameter held here."""
    shapes: dict[str, tuple[int, ...]]
    """Every trained parameter of the whole model, by name on disk."""
    names: Names
    """Of every parameter of the whole model."""
    buffers: list[LocalShard]
    """Persistent buffers that the checkpoint holds (a router's correction bias): loaded, never trained."""
    quantized: list[QuantizedShard]
    """Frozen weights held in 4 bits: loaded beside `parts`, never trained or sent."""
    statistics: list[LocalShard]
    """Those of them that training changes: running statistics of batch normalisation."""
    tied: list[LocalShard]
    """Parts whose gradient another rank holds too (a tied head away from its embedding)."""
    tied_group: dist.ProcessGroup | None
    model_group: dist.ProcessGroup | None
    """Ranks that hold this replica together; None: all."""
    parameters: int
    trained: int
    operations: float
    """Of the whole model on one token, floating-point ones of weights and attention; NaN: not known."""


def build_meta_model(config: Any, task: Task, attention: Attention, settings: TrainingSettings) -> nn.Module:
    """The whole model without memory: adapters in, what is frozen marked."""
    skeleton = build_base_model(config, task.factory, attention)
    recomputes = settings.layout.activation_checkpointing != "none"
    if reason := refusal_of_batch_norms(skeleton, adapters=bool(settings.lora.rank), recomputes=recomputes):
        raise ConfigurationError(reason)
    if settings.lora.rank:
        check_quantized(skeleton, settings.lora)
        if reason := refusal_of_adapters(skeleton, settings.lora):
            raise InputError(reason)
        lora.inject_adapters(skeleton, settings.lora, classifies=task.answers)
    frozen = [
        name for name, one in skeleton.named_parameters() if one.requires_grad and matches_any(name, settings.freeze)
    ]
    for name in frozen:
        skeleton.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in skeleton.parameters()):
        raise ConfigurationError(f"training.freeze {settings.freeze} leaves no parameter to train; freeze fewer")
    if frozen and settings.lora.rank:
        raise ConfigurationError(f"training.freeze {settings.freeze} {of_adapters(frozen)}")
    return skeleton


def assemble_part(
    skeleton: nn.Module,
    task: Task,
    checkpoint: Checkpoint,
    sharder: Sharder,
    *,
    structure: ModelStructure | None = None,
    chunk_rows: int = 0,
) -> Assembly:
    """Cut, shard and allocate this rank's part of a meta model.

    `structure`: where the layout has pipeline stages, which are cut by it. `chunk_rows`: see `facility.training.head`.
    """
    found = names_of(skeleton, checkpoint)
    names = found.disk
    trained = {names[n]: tuple(p.shape) for n, p in skeleton.named_parameters() if p.requires_grad}
    parameters = sum(p.numel() for p in skeleton.parameters())
    operations = weight_operations(skeleton) + attention_operations(skeleton, sharder.layout.block_tokens)
    running = {found.conversion.same.get(lora.name_on_disk(name)) for name in statistics_names(skeleton)}
    quantize_layers(skeleton, sharder.settings)
    layout, ranks, stall = sharder.layout, sharder.ranks, sharder.settings.stall_seconds
    tied: list[LocalShard] = []
    group: dist.ProcessGroup | None = None
    if not layout.units:
        compute: Compute = assemble_whole(skeleton, task, sharder, chunk_rows)
        held, buffers = shards_of(skeleton, names), buffers_of(skeleton, found)
        quantized = quantized_shards(skeleton, names)
    else:
        assert structure is not None
        tied_names = tied_to_embedding(skeleton, structure)
        stages = cut_stages(skeleton, structure, sharder, chunk_rows)
        in_first = {names[alias] for alias in tied_names.values()}
        held = shards_of_stages(stages, names, in_first)
        buffers = [part for stage in stages.values() for part in buffers_of(stage.model, found)]
        quantized = [part for stage in stages.values() for part in quantized_shards(stage.model, names)]
        group, first_rank_only = tied_group(layout.grid, ranks, stall, tied=bool(tied_names))
        if group is not None:
            tied = [p for p in held if p.trained and (p.copy or (first_rank_only and p.name in in_first))]
        from facility.training.parallel.pipeline import Pipeline  # torch's pipelining: only where there are stages

        compute = Pipeline(stages, structure, task, sharder)
    return Assembly(
        compute=compute,
        parts=held,
        shapes=trained,
        names=found,
        buffers=buffers,
        quantized=quantized,
        statistics=[part for part in buffers if part.name in running],
        tied=tied,
        tied_group=group,
        model_group=model_group(layout.grid, ranks, stall),
        parameters=parameters,
        trained=sum(torch.Size(s).numel() for s in trained.values()),
        operations=operations,
    )


def assemble_whole(model: nn.Module, task: Task, sharder: Sharder, chunk_rows: int) -> Whole:
    """The whole model on this rank: sharded, among copies of itself, or alone."""
    prepare_blocks(model, sharder.settings)
    compiled = sharder.settings.layout.compile
    chunked = ChunkedHead(model, chunk_rows, compiled=compiled) if chunk_rows else None
    sharder.allocate(model, layers_of(find_blocks(model)[1]), torch.float32)
    replicated = None
    if sharder.layout.copies:
        assert sharder.mesh is not None
        among = sharder.mesh["replica"].get_group()
        with warnings.catch_warnings():  # torch 2.13 has another name for it, with which buffers are sent at first
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            replicated = DistributedDataParallel(
                model,
                process_group=among,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,  # a step may leave some out; where none is, torch warns, in C++
            )
        time_all_reduce(replicated, among, sharder.clock)
    return Whole(model, task, sharder.precision, sharder.clock, replicated=replicated, chunked=chunked)


def cut_stages(skeleton: nn.Module, structure: ModelStructure, sharder: Sharder, chunk_rows: int) -> dict[int, Stage]:
    """This rank's stages of the model, allocated, by their number."""
    layout = sharder.layout
    _, row, _ = layout.grid.place(sharder.ranks.rank)
    stages: dict[int, Stage] = {}
    for index in range(row, len(layout.units), layout.grid.stages):
        first, end = layout.units[index]
        model = copy.deepcopy(skeleton)
        prepare_blocks(
            model, sharder.settings
        )  # after the copy: a wrapped forward would call the original's parameters
        output = torch.float32 if index == len(layout.units) - 1 else sharder.dtype
        stage = Stage(
            model, structure, first, end, output, chunk_rows=chunk_rows, compiled=sharder.settings.layout.compile
        )
        blocks = model.get_submodule(structure.blocks)
        assert isinstance(blocks, nn.ModuleList)
        own = list(blocks)[max(0, first - 1) : max(0, min(end, structure.count + 1) - 1)]
        sharder.allocate(stage, own, None)
        stages[index] = stage
    return stages


def shards_of(model: nn.Module, names: dict[str, str]) -> list[LocalShard]:
    """What this rank holds of every parameter of the model, by name on disk."""
    return [
        shard_of(names.get(name, name), parameter)
        for name, parameter in model.named_parameters()
        if not is_quantized(parameter)
    ]


def shards_of_stages(stages: dict[int, Stage], names: dict[str, str], in_first: set[str]) -> list[LocalShard]:
    """Local shards of a rank's stages; a tied head away from its embedding is a copy under the embedding's name.

    `in_first`: the names on disk of the embeddings that a head is tied to.
    """
    held = []
    for stage in stages.values():
        for part in shards_of(stage.model, names):
            away = stage.first > 0 and part.name in in_first
            held.append(dataclasses.replace(part, copy=True) if away else part)
    return held


def buffers_of(model: nn.Module, names: Names) -> list[LocalShard]:
    """The persistent buffers held here that the checkpoint holds too, under their names there."""
    same = names.conversion.same
    return [
        shard_of(same[lora.name_on_disk(name)], nn.Parameter(buffer, requires_grad=False))
        for name, buffer in model.named_buffers()
        if lora.name_on_disk(name) in same
    ]


def tied_to_embedding(model: nn.Module, structure: ModelStructure) -> dict[str, str]:
    """Names after the last block that share a parameter with a name before the first: head -> embedding."""
    owners: dict[int, str] = {}
    result = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if structure.unit_of(name) == 0:
            owners[id(parameter)] = name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if structure.unit_of(name) == structure.count + 1 and id(parameter) in owners:
            result[name] = owners[id(parameter)]
    return result


def tied_group(
    grid: Grid, ranks: Ranks, timeout_seconds: float, *, tied: bool
) -> tuple[dist.ProcessGroup | None, bool]:
    """The first and the last rank of this rank's pipeline, if it is one of them; and whether it is the first."""
    if not tied:
        return None, False
    pairs = grid.ranks[:, [0, -1], :].transpose(0, 2, 1).reshape(-1, 2).tolist()
    mine = group_among(pairs, ranks.rank, timeout_seconds=timeout_seconds)
    return mine, ranks.rank in grid.ranks[:, 0]


def model_group(grid: Grid, ranks: Ranks, timeout_seconds: float) -> dist.ProcessGroup | None:
    """The ranks that hold this rank's replica of the model; None where that is every rank."""
    if grid.replicas == 1 or ranks.world == 1:
        return None
    return group_among(
        [sorted(replica.flatten().tolist()) for replica in grid.ranks], ranks.rank, timeout_seconds=timeout_seconds
    )


def prepare_blocks(model: nn.Module, settings: TrainingSettings) -> None:
    """Activation checkpointing and compilation of every block, before the model is cut and sharded."""
    from facility.training.parallel.recompute import recompute_in_backward

    if settings.layout.compile:
        leave_out_locked_headers()
    for block in layers_of(find_blocks(model)[1]):
        if settings.layout.activation_checkpointing != "none":
            recompute_in_backward(block, selective=settings.layout.activation_checkpointing == "selective")
        if settings.layout.compile:
            block.compile()


def leave_out_locked_headers() -> None:
    """Where TMPDIR has no locks, let torch precompile no C++ headers: it does so there, under a lock, wherever else it
    keeps what it compiles (`facility.launching.compiled`)."""
    if temporary_place() != tempfile.gettempdir():
        import torch._inductor.config

        torch._inductor.config.cpp_cache_precompile_headers = False


def layers_of(block: nn.Module) -> list[nn.Module]:
    """A block, or what it lists: a list of layers (Funnel) is never called, its layers are."""
    return [layer for inner in block for layer in layers_of(inner)] if isinstance(block, nn.ModuleList) else [block]
