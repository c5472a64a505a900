"""From a checkpoint's configuration and a grid to what this rank holds, materialised and ready to be loaded."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings
from facility.training import lora
from facility.training.data.tasks import Task
from facility.training.head import ChunkedHead
from facility.training.model import Attention, Names, build, names_of
from facility.training.monitor.clock import Clock
from facility.training.parallel.arrange import Layout
from facility.training.parallel.collectives import time_all_reduce, time_collectives
from facility.training.parallel.compute import Compute, Pipeline, Precision, Whole
from facility.training.parallel.grid import Grid
from facility.training.parallel.ranks import Ranks
from facility.training.parallel.shard import find_blocks, shard
from facility.training.parallel.split import ModelStructure, Stage
from facility.training.state.load import LocalShard, initialise_parameters, shard_of


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
    tied: list[LocalShard]
    """Parts whose gradient another rank holds too (a tied head away from its embedding)."""
    tied_group: dist.ProcessGroup | None
    model_group: dist.ProcessGroup | None
    """Ranks that hold this replica together; None: all."""
    mesh: DeviceMesh | None
    structure: ModelStructure | None
    parameters: int
    trained: int


def frozen(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def build_meta_model(config: Any, task: Task, attention: Attention, settings: TrainingSettings) -> nn.Module:
    """The whole model without memory: adapters in, what is frozen marked."""
    skeleton = build(config, task.factory, attention)
    if settings.lora.rank:
        lora.inject(skeleton, settings.lora)
    for name, parameter in skeleton.named_parameters():
        if frozen(name, settings.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in skeleton.parameters()):
        raise ConfigurationError(f"training.freeze {settings.freeze} leaves no parameter to train")
    return skeleton


def assemble(
    skeleton: nn.Module,
    task: Task,
    checkpoint: Checkpoint,
    layout: Layout,
    ranks: Ranks,
    settings: TrainingSettings,
    clock: Clock,
    structure: ModelStructure | None,
    chunk_rows: int = 0,
) -> Assembly:
    """Cut, shard, and give memory to this rank's part of a drawn model only; `chunk_rows`: see `facility.training.head`."""
    found = names_of(skeleton, checkpoint)
    names = found.disk
    trained = {names[n]: tuple(p.shape) for n, p in skeleton.named_parameters() if p.requires_grad}
    parameters = sum(p.numel() for p in skeleton.parameters())
    dtype = getattr(torch, settings.compute_dtype)
    grid = layout.grid
    replica, row, column = grid.place(ranks.rank)
    mesh = None
    if ranks.world > 1:
        mesh = DeviceMesh(ranks.device.type, torch.from_numpy(grid.ranks), mesh_dim_names=("replica", "stage", "shard"))
    in_mesh = layout.replicas_in_mesh and grid.replicas > 1
    copies = in_mesh and layout.agrees_once and not layout.units
    sharded = (grid.shards > 1 or in_mesh) and not copies
    precision = Precision(ranks.device, dtype, casts_itself=sharded)

    def cut(module: nn.Module, blocks: list[nn.Module], output: torch.dtype | None) -> None:
        if sharded:
            assert mesh is not None
            chosen = mesh["replica", "shard"] if in_mesh else mesh["shard"]
            shard(
                module,
                blocks,
                chosen,
                compute_dtype=dtype,
                reshard=layout.reshard and not layout.units,
                offload=settings.layout.offload,
                root_output=output,
            )
            time_collectives(module, clock, replicas=in_mesh)
        initialise_parameters(module, ranks.device)

    def parts(model: nn.Module, keep: bool = True) -> list[LocalShard]:
        return [shard_of(names.get(name, name), parameter) for name, parameter in model.named_parameters()]

    if not layout.units:
        prepare_blocks(skeleton, settings)
        chunked = ChunkedHead(skeleton, chunk_rows) if chunk_rows else None
        cut(skeleton, list(find_blocks(skeleton)[1]), torch.float32)
        replicated = None
        if copies:
            assert mesh is not None
            among = mesh["replica"].get_group()
            replicated = DistributedDataParallel(
                skeleton,
                process_group=among,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,
            )
            time_all_reduce(replicated, among, clock)
        return Assembly(
            compute=Whole(skeleton, task, precision, clock, replicated=replicated, chunked=chunked),
            parts=parts(skeleton),
            shapes=trained,
            names=found,
            buffers=buffers_of(skeleton, found),
            tied=[],
            tied_group=None,
            model_group=model_group(grid, ranks),
            mesh=mesh,
            structure=structure,
            parameters=parameters,
            trained=sum(torch.Size(s).numel() for s in trained.values()),
        )

    assert mesh is not None and structure is not None
    stages: dict[int, Stage] = {}
    held: list[LocalShard] = []
    tied_names = tied_to_embedding(skeleton, structure)
    for index in range(row, len(layout.units), grid.stages):
        first, end = layout.units[index]
        model = copy.deepcopy(skeleton)
        prepare_blocks(model, settings)  # after the copy: a wrapped forward would call the original's parameters
        last = index == len(layout.units) - 1
        stage = Stage(model, structure, first, end, torch.float32 if last else dtype, chunk_rows=chunk_rows)
        blocks = model.get_submodule(structure.blocks)
        assert isinstance(blocks, nn.ModuleList)
        cut(stage, list(blocks)[max(0, first - 1) : max(0, min(end, structure.count + 1) - 1)], None)
        stages[index] = stage
        for part in parts(model):
            alias = tied_names.get(part.name)
            if alias is not None and first > 0:
                part = dataclasses.replace(part, name=names[alias], copy=True)
            held.append(part)
    group, first_rank_only = tied_group(grid, ranks, bool(tied_names))
    originals = {names[alias] for alias in tied_names.values()}
    tied = [p for p in held if p.trained and (p.copy or (first_rank_only and p.name in originals))]
    pipeline = Pipeline(
        stages,
        len(layout.units),
        structure,
        task,
        precision,
        clock,
        group=mesh["stage"].get_group(),
        schedule=layout.schedule,
        micro_batches=layout.shape.micro_batches[grid.data_rank(ranks.rank)],
        micro_batch_sequences=layout.shape.micro_batch_sequences,
        block_tokens=layout.block_tokens,
    )
    return Assembly(
        compute=pipeline,
        parts=held,
        shapes=trained,
        names=found,
        buffers=[part for stage in stages.values() for part in buffers_of(stage.model, found)],
        tied=tied if group is not None else [],
        tied_group=group,
        model_group=model_group(grid, ranks),
        mesh=mesh,
        structure=structure,
        parameters=parameters,
        trained=sum(torch.Size(s).numel() for s in trained.values()),
    )


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


def tied_group(grid: Grid, ranks: Ranks, tied: bool) -> tuple[dist.ProcessGroup | None, bool]:
    """The first and the last rank of this rank's pipeline, if it is one of them; and whether it is the first.

    Every rank takes part in making every group, as torch asks.
    """
    mine, first = None, False
    if tied:
        for replica in range(grid.replicas):
            for column in range(grid.shards):
                pair = [int(grid.ranks[replica, 0, column]), int(grid.ranks[replica, -1, column])]
                group = dist.new_group(pair)
                if ranks.rank in pair:
                    assert isinstance(group, dist.ProcessGroup)
                    mine, first = group, ranks.rank == pair[0]
    return mine, first


def model_group(grid: Grid, ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks that hold this rank's replica of the model; None where that is every rank."""
    if grid.replicas == 1 or ranks.world == 1:
        return None
    mine = None
    for replica in range(grid.replicas):
        members = sorted(grid.ranks[replica].flatten().tolist())
        group = dist.new_group(members)
        if ranks.rank in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def prepare_blocks(model: nn.Module, settings: TrainingSettings) -> None:
    """Activation checkpointing and compilation of every block, before the model is cut and sharded."""
    from facility.training.parallel.recompute import recompute_in_backward

    for block in find_blocks(model)[1]:
        if settings.layout.activation_checkpointing != "none":
            recompute_in_backward(block, selective=settings.layout.activation_checkpointing == "selective")
        if settings.layout.compile:
            block.compile()
