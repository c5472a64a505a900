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
import gc
import os
from pathlib import Path

from facility.exchange.files.compiled_code import compiled_code_place
from facility.exchange.logs import add_log_options


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m facility.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR", help="the received Hugging Face checkpoint")
    p.add_argument("--dataset", type=Path, required=True, metavar="DIR", help="what `python -m facility.prepare` wrote")
    p.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    p.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the update; must not exist, appears whole")
    p.add_argument(
        "--own-models", type=Path, metavar="DIR", help="models of this facility's own to evaluate beside those received"
    )
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
        "--plan",
        type=Path,
        metavar="FILE",
        help="a plan.json with the model's layout over the ranks (default: training.layout.plan, if any)",
    )
    p.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of this round, over the same part of the learning rate's schedule; default: "
        "training.steps of the settings",
    )
    p.add_argument("--progress", action="store_true", help="a line for every step on stderr, not one a second at most")
    _add_ways_to_send(p)
    add_log_options(p)
    return p


def _add_ways_to_send(p: argparse.ArgumentParser) -> None:
    """Options for the form in which the update leaves, and for the residual of earlier updates."""
    p.add_argument(
        "--unsent",
        type=Path,
        metavar="DIR",
        help="residual of this facility's earlier updates (error feedback): added to the received weights before the "
        "first step, a share of it where the encoding fades",
    )
    p.add_argument(
        "--unsent-out",
        type=Path,
        metavar="DIR",
        help="write the update as a message in the settings' encoding, straight from memory, and its residual here; "
        "must not exist. Where several ranks train, or the model is stored in other pieces, the update is "
        "written whole",
    )
    p.add_argument(
        "--left",
        type=Path,
        metavar="DIR",
        help="with --unsent-out and an encoding that fades: the residual of the last message; the share of it that was "
        "not trained from is added to the difference before it is encoded",
    )
    p.add_argument(
        "--roster",
        type=Path,
        metavar="DIR",
        help="mask the update under this roster of secure aggregation, straight from memory; the masked tensors stay "
        "in the state directory, and the update is left without weights. Where several ranks train, or the model is "
        "stored in other pieces, it is written whole",
    )


def main(argv: list[str] | None = None) -> int:
    """Run one round on this rank; returns its exit code."""
    arguments = parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a round needs nothing of the hub; bitsandbytes would fetch code from there
    os.environ.update(compiled_code_place())
    from facility.training.train_round import train_round  # imports torch and transformers, which takes seconds

    return train_round(arguments)


if __name__ == "__main__":
    parser().parse_args()  # help and mistakes are answered at once
    # Libraries leave half a million objects that live to the end; looking through them for garbage as they come took an
    # eighth of a trainer's start. `train_round` collects from where they are loaded.
    gc.disable()
    from facility.training.processes.ranks import run_and_exit  # imports torch

    run_and_exit(main)
