"""The ranks of one facility: their numbers, how they start, fail together, and end."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from facility.exchange.addresses import LOOPBACK
from facility.exchange.errors import (
    ConfigurationError,
    CrossFedError,
    InputError,
    NotWritten,
    TransientError,
    exit_on_error,
)
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.storage import file_error_sentence, is_storage
from facility.training.processes.exchange import all_gather_json, broadcast_json

KINDS: dict[str, type[CrossFedError]] = {kind.__name__: kind for kind in (NotWritten, TransientError)}
"""Errors that keep their kind from rank to rank; any other is an `InputError` there."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the facility, as RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    number: int = 0
    """RANK as the launcher gave it; a plan may number the ranks that it uses anew."""
    one_node: bool = True
    """True if every rank of the job, idle ones included, is on this node."""
    hosts: bool = False
    """True if the store at which the ranks meet runs in this process (torchrun runs it itself)."""
    members: tuple[int, ...] = ()
    """The ranks that finish the round, ascending, where a replica was lost; empty: all."""
    group: dist.ProcessGroup | None = None
    """The process group of `members`; None: the default one, of all."""

    @property
    def first(self) -> bool:
        """True on the rank that reports for all."""
        return self.rank == (self.members[0] if self.members else 0)


def from_environment(device: str) -> Ranks:
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
    return Ranks(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        device=chosen,
        number=rank,
        one_node=local_world == world
        and ("LOCAL_WORLD_SIZE" in os.environ or os.environ.get("MASTER_ADDR", "localhost") in LOOPBACK),
        hosts=rank == 0,
    )


def regroup(ranks: Ranks, members: Sequence[int], *, timeout_seconds: float) -> Ranks:
    """This rank among `members` alone, which all call this: the others are gone and not waited for."""
    group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_seconds), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return replace(ranks, members=tuple(members), group=group)


@contextmanager
def agree_on_failure(ranks: Ranks) -> Iterator[None]:
    """Run a part of work that may refuse its input, or whose file system may refuse what is written: what one rank
    refuses, every rank refuses, each once."""
    mine: CrossFedError | None = None
    try:
        yield
    except CrossFedError as error:
        mine = error
    except OSError as error:
        if not is_storage(error):
            raise
        mine = NotWritten(file_error_sentence(error, again=False))
    if ranks.world > 1:
        name = next((name for name, kind in KINDS.items() if isinstance(mine, kind)), "")
        found = all_gather_json(None if mine is None else [str(mine), name], ranks.group)
        for number, item in enumerate(found):
            if item is not None and mine is None:
                message, name = item
                raise KINDS.get(name, InputError)(f"rank {number}: {message}")
    if mine is not None:
        raise mine


def broadcast(ranks: Ranks, value: str | None) -> str:
    """The first rank's text, on every rank."""
    text = broadcast_json(value, ranks.group) if ranks.world > 1 else value
    assert isinstance(text, str)
    return text


def gather(ranks: Ranks, value: Any) -> list[Any]:
    """A small JSON value of every rank, on every rank."""
    return all_gather_json(value, ranks.group) if ranks.world > 1 else [value]


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    if ranks.world > 1:
        dist.barrier(ranks.group)


def lost_contact(error: BaseException | None) -> str:
    """The first line of a collective's failure because a peer is gone or hangs; empty for any other error."""
    while error is not None:
        text = str(error).strip()
        closed = isinstance(error, RuntimeError) and re.search(
            r"gloo/transport|Connection (closed|reset) by peer", text
        )
        if isinstance(error, dist.DistError) or closed:
            return text.splitlines()[0] if text else type(error).__name__
        error = error.__cause__ or error.__context__
    return ""


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a rank's `main`, which ends well behind a barrier, and leave the process with its code.

    Every rank ends by flush and `os._exit`: torch 2.13 on a CPU sometimes aborts at interpreter exit after FSDP. A
    rank that fails does not wait for the others, which notice its closed connections.
    """
    try:
        code = exit_on_error(main, in_job=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = int(ExitCode.INTERRUPTED)
    except BaseException as error:
        rank = os.environ.get("RANK", "0")
        if reason := lost_contact(error):
            again = "the same command, run again, starts the round from its last checkpoint"
            print(f"error: rank {rank} lost contact with another rank ({reason}); {again}", file=sys.stderr)
            code = int(ExitCode.TRANSIENT)
        else:
            print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
