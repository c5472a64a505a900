"""Train one local round: a global model in, an update out.

    python -m facility.train --model DIR --dataset DIR --settings FILE --round N --out DIR

Run by one process, or by several whose environment says which ranks they are (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT): `python -m facility.launch` and torchrun both set it. Exit codes: 0 the update is complete;
85 time ran out, the same command resumes; 2 the input must be changed; 75 a transient error; 1 a bug.

Round N = rounds, one past the last, asks for the evaluation of the final model: no step is taken, no state is touched,
and the update holds `report.json` and `manifest.json` alone. A directory of several models there asks for each of them
to be evaluated, block by block.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from facility.exchange.messages.outcome import Outcome
from facility.training.comparison import compare, finish_comparison
from facility.training.data.inputs import RoundInputs, read_inputs
from facility.training.devices import device_name
from facility.training.finish import finish_evaluation, finish_round
from facility.training.monitor.logs import start_logging
from facility.training.parallel.arrange import check_devices
from facility.training.prepare import Setup, choose_setup, prepare_ranks
from facility.training.processes.ranks import Ranks, barrier, end, together
from facility.training.progress import show_stage
from facility.training.request import RoundRequest, read_request
from facility.training.round import Round
from facility.training.state.resume import SavedState, read_saved_state
from facility.training.stop import Stop

log = logging.getLogger("facility.train")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m facility.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR", help="the received Hugging Face checkpoint")
    p.add_argument("--dataset", type=Path, required=True, metavar="DIR", help="what `python -m facility.prepare` wrote")
    p.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    p.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the update; must not exist, appears whole")
    p.add_argument(
        "--job-directory", type=Path, metavar="DIR", help="where progress.json goes; default: the directory of --out"
    )
    p.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="what is kept between rounds; default: "
        "$CROSSFED_STATE/<federation>/<facility>, or .crossfed/<federation>/<facility> beside the dataset",
    )
    p.add_argument(
        "--unsent",
        type=Path,
        metavar="DIR",
        help="what earlier updates of this facility left out: added to the received weights before the first step",
    )
    p.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a plan.json that lays the model over the ranks; default: training.layout.plan of the settings, if any",
    )
    p.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of this round, over the same part of the learning rate's schedule; default: "
        "training.steps of the settings",
    )
    p.add_argument("--progress", action="store_true", help="a line for every step on stderr, not one a second at most")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run one round on this rank; returns its exit code."""
    request = read_request(parser().parse_args(argv), began=time.perf_counter())
    stop = Stop(request.training.limits, request.began)
    ranks = prepare_ranks(request)
    if ranks is None:
        print(f"rank {os.environ.get('RANK', 0)}: the plan leaves this rank idle", flush=True)
        return Outcome.DONE
    start_logging(ranks, request.name)
    show_stage(ranks, request.job_directory, "loading")
    inputs, setup, saved = read(request, ranks)

    round = Round(request, ranks, inputs, setup)
    round.restore(saved)
    round.evaluate_received()
    if request.bundle is not None:
        finish_comparison(round, compare(round))
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
    with together(ranks):
        if request.plan is not None and (request.training.layout.shards or 1) == 1:
            check_devices(request.plan, ranks.number, ranks)
        inputs = read_inputs(request, ranks)
        setup = choose_setup(request, inputs, ranks)
        saved = read_saved_state(request, inputs.base_sha256)
    attention = f"attention {inputs.attention.name}: {inputs.attention.reason}"
    log.info("%d rank(s) on %s; %s", ranks.world, device_name(ranks.device), attention)
    for reason in (*setup.layout.reasons, setup.head.reason, saved.reason):
        log.info("%s", reason)
    return inputs, setup, saved


if __name__ == "__main__":
    end(main)
