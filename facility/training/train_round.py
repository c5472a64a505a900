"""One local round on one rank, from the received model to the update: what `facility.train` runs."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time

import torch

from facility.exchange.files.storage import is_storage, with_place
from facility.exchange.messages.outcome import Outcome
from facility.exchange.text import number_of
from facility.training.account import most_resident_bytes
from facility.training.comparison import compare_models, finish_comparison
from facility.training.data.inputs import RoundInputs, read_inputs
from facility.training.devices import address_space_limit, device_name
from facility.training.finish import finish_evaluation, finish_round
from facility.training.memory import is_out_of_host_memory, out_of_host_memory, out_of_memory
from facility.training.monitor.logs import start_logging
from facility.training.parallel.arrange import check_devices
from facility.training.prepare import Setup, choose_setup, prepare_ranks
from facility.training.processes.ranks import Ranks, agree_on_failure, barrier
from facility.training.progress import show_stage
from facility.training.request import RoundRequest, read_request
from facility.training.round import Round
from facility.training.state.resume import SavedState, read_saved_state
from facility.training.stop import Stop

log = logging.getLogger(__name__)


def train_round(arguments: argparse.Namespace) -> int:
    """Run one round on this rank as the command line says; returns its exit code."""
    request = read_request(arguments, began=time.perf_counter())
    try:
        return _train_round(request)
    except OSError as error:
        if not is_storage(error):
            raise
        raise with_place(error, [request.state, request.job_directory]) from None
    except torch.OutOfMemoryError:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        name, held = torch.cuda.get_device_name(device), torch.cuda.memory_reserved(device)
        raise out_of_memory(name, total, free, held) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_host_memory(error):
            raise
        raise out_of_host_memory(most_resident_bytes(), address_space_limit()) from None


def _train_round(request: RoundRequest) -> int:
    """The stages of the round, in order."""
    stop = Stop(request.training.limits, request.began)
    if request.evaluates_only or request.bundle is not None:
        stop.nothing_to_save()
    ranks = prepare_ranks(request)
    if ranks is None:
        log.info("rank %s: the plan leaves this rank idle", os.environ.get("RANK", 0))
        return Outcome.DONE
    start_logging(ranks, request.name)
    show_stage(ranks, request.job_directory, "loading")
    inputs, setup, saved = read(request, ranks)

    round = Round(request, ranks, inputs, setup)
    round.restore(saved)
    with round.budget():
        round.evaluate_received()
        if request.bundle is not None:
            finish_comparison(round, compare_models(round))
            return Outcome.DONE
        if request.evaluates_only:
            finish_evaluation(round)
            return Outcome.DONE
        round.connect_replicas()
        if not round.train(stop):
            return Outcome.CHECKPOINTED
        round.evaluate_returned()
        finish_round(round)
    log.info("update written to %s", request.out)
    barrier(round.ranks)
    return Outcome.DONE


def read(request: RoundRequest, ranks: Ranks) -> tuple[RoundInputs, Setup, SavedState]:
    """Open and check all input, choose the layout, find saved state: one rank's refusal is every rank's."""
    with agree_on_failure(ranks):
        if request.plan is not None and (request.training.layout.shards or 1) == 1:
            check_devices(request.plan, ranks.number, ranks)
        inputs = read_inputs(request, ranks)
        collect()
        setup = choose_setup(request, inputs, ranks)
        saved = read_saved_state(request, inputs.base_sha256)
    attention = f"attention {inputs.attention.name}: {inputs.attention.reason}"
    log.info("%s on %s; %s", number_of(ranks.world, "rank"), device_name(ranks.device), attention)
    for reason in (*setup.layout.reasons, setup.head.reason, saved.reason):
        log.info("%s", reason)
    return inputs, setup, saved


def collect() -> None:
    """Collect garbage from here on, among what is made from here on: the libraries are loaded and stay."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
