"""The processes of one facility: who they are, how they start, fail together, and end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from facility.exchange.errors import ConfigurationError, CrossFedError, InputError, TryAgain, exit_on_error
from facility.training.parallel.exchange import all_gather_json, broadcast_json


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the facility, as RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    hosts: bool = False
    """Does the store run in this process at which the ranks meet? (Not with torchrun, which runs it itself.)"""

    @property
    def first(self) -> bool:
        """Does this rank speak for all?"""
        return self.rank == 0


def from_environment(device: str = "auto") -> Ranks:
    """Who this process is; alone where the environment says nothing. `device`: auto, cpu or cuda."""
    values = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if values["WORLD_SIZE"] in (None, "1"):
        rank, world = 0, 1
    else:
        if missing := [name for name, value in values.items() if value is None]:
            raise ConfigurationError(
                f"WORLD_SIZE is {values['WORLD_SIZE']}, but {', '.join(missing)} is not set; "
                "start the ranks with `python -m facility.launch` or torchrun"
            )
        rank, world = int(values["RANK"] or 0), int(values["WORLD_SIZE"] or 1)
    local_rank = int(os.environ.get("LOCAL_RANK", "0" if world == 1 else str(rank)))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("training.device is 'cuda', but torch sees no GPU here; use 'auto' or 'cpu'")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    else:
        chosen = torch.device("cpu")
    return Ranks(rank=rank, world=world, local_rank=local_rank, local_world=local_world, device=chosen, hosts=rank == 0)


def start(ranks: Ranks, *, threads: int, timeout_seconds: float) -> None:
    """Set the process's device and threads, and meet the other ranks. A hung peer is noticed after the timeout."""
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", max(1, cores // ranks.local_world))))
    if ranks.world > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout_seconds)
        try:
            store = None
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # A plan may number ranks anew; the store stays with the process that MASTER_ADDR names.
                where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(*where, world_size=ranks.world, is_master=ranks.hosts, timeout=limit)
            dist.init_process_group(backend, store=store, timeout=limit, rank=ranks.rank, world_size=ranks.world)
        except dist.DistError as error:
            raise TryAgain(f"rank {ranks.rank} of {ranks.world} could not meet the others: {error}") from None


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Run a part of work that may refuse its input: what one rank refuses, every rank refuses, each once."""
    mine: CrossFedError | None = None
    try:
        yield
    except CrossFedError as error:
        mine = error
    if ranks.world > 1:
        found = all_gather_json(None if mine is None else [str(mine), isinstance(mine, TryAgain)])
        for number, item in enumerate(found):
            if item is not None and mine is None:
                message, again = item
                raise (TryAgain if again else InputError)(f"rank {number}: {message}")
    if mine is not None:
        raise mine


def broadcast(ranks: Ranks, value: str | None) -> str:
    """The first rank's text, on every rank."""
    text = broadcast_json(value) if ranks.world > 1 else value
    assert isinstance(text, str)
    return text


def gather(ranks: Ranks, value: Any) -> list[Any]:
    """A small JSON value of every rank, on every rank."""
    return all_gather_json(value) if ranks.world > 1 else [value]


def barrier(ranks: Ranks) -> None:
    if ranks.world > 1:
        dist.barrier()


def end(main: Callable[[], int]) -> NoReturn:
    """Run a rank's `main` and leave the process with its code.

    Every rank ends by flush and `os._exit`: torch 2.13 on a CPU sometimes aborts at interpreter exit after FSDP. A
    rank that fails does not wait for the others, who notice its closed connections.
    """
    try:
        code = exit_on_error(main)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        code = 1
    if code == 0 and dist.is_available() and dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
