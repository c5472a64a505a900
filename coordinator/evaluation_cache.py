"""The data sets that tasks of lm-eval read, fetched here for facilities without internet, and proved to suffice.

    python -m coordinator.evaluation_cache TASK [TASK ...] [--include DIR]

loads the tasks, which fetches their data into $HF_HOME. `crossfed bundle --eval` runs it twice: with the network, then
without, so that an incomplete bundle is noticed where it can be completed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import ERROR, InputError, TransientError, exit_on_error, first_line
from facility.exchange.exit_codes import ExitCode
from facility.exchange.hub import offline_if_silent, why_hub_is_silent
from facility.exchange.logs import add_log_options

FOLDER = "evaluation"
"""In a bundle: what `facility/setup.sh` adds to the facility's Hugging Face cache."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LAST_LINES = 3

WHERE = "give the same command where there is a network, or name a proxy by HTTPS_PROXY"
"""What to do where the hub does not answer."""

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def fill_cache(out: Path, tasks: Sequence[str], *, include: Path | None = None, run: Run | None = None) -> Path:
    """Fetch what the tasks read into `out`/evaluation; returns that folder. `include`: folder with YAML files of tasks.

    Raises `InputError` without lm-eval or for a task that it does not know, `TransientError` where the tasks cannot be
    loaded, with or without the network.
    """
    if run is None and importlib.util.find_spec("lm_eval") is None:
        raise InputError("--eval needs lm-eval on this machine: pip install lm-eval")
    place = (out / FOLDER).resolve()
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "coordinator.evaluation_cache", *tasks]
    command += ["--include", str(include.resolve())] if include is not None else []
    plain = {name: value for name, value in os.environ.items() if name not in (*OFFLINE, *CACHES)}
    with_network = plain | {"HF_HOME": str(place)}
    for environment, where in ((with_network, "with the network"), (with_network | OFFLINE, "without a network")):
        done = (run or _run)(command, environment)
        if done.returncode:
            said = (done.stdout or "").strip().splitlines()[-LAST_LINES:]
            if said and said[-1].startswith(ERROR) and done.returncode in (ExitCode.INPUT, ExitCode.TRANSIENT):
                known = InputError if done.returncode == ExitCode.INPUT else TransientError
                raise known(said[-1].removeprefix(ERROR))
            raise TransientError(
                f"the tasks {', '.join(tasks)} cannot be loaded {where}: {' / '.join(said) or 'no reason'}"
            )
    for lock in [*place.rglob("*.lock"), *place.rglob(".locks")]:
        shutil.rmtree(lock) if lock.is_dir() else lock.unlink(missing_ok=True)
    return place


CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
"""Variables that would name other folders than those in $HF_HOME."""


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.evaluation_cache", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK", help="name of a task or group of lm-eval")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with YAML files of further tasks")
    add_log_options(parser)
    arguments = parse_arguments(parser)
    if arguments.include is None and _nothing_is_here() and (silent := why_hub_is_silent()):
        raise TransientError(f"{silent}: {WHERE}")  # before lm-eval has read its thousands of tasks
    from lm_eval.tasks import TaskManager, get_task_dict

    manager = TaskManager(include_path=str(arguments.include) if arguments.include else None)
    if unknown := [name for name in arguments.tasks if name not in manager.all_tasks]:
        raise InputError(f"lm-eval knows no task {', '.join(unknown)}: `lm-eval ls tasks` lists them")
    load(lambda: get_task_dict(arguments.tasks, manager))
    return 0


def load(tasks: Callable[[], object]) -> None:
    """Call `tasks`, which loads them with their data. Raises `TransientError` soon where the hub does not answer and
    what is here already does not suffice: its libraries would ask for each file again and again, for minutes."""
    with offline_if_silent() as silent:
        try:
            tasks()
        except Exception as error:
            if not silent:
                raise
            raise TransientError(
                f"{silent}, and not all data are here already ({first_line(error)}): {WHERE}"
            ) from None


def _nothing_is_here() -> bool:
    """Whether $HF_HOME holds no file, so that every task of lm-eval's own has to be fetched."""
    return not any(path.is_file() for path in Path(os.environ.get("HF_HOME") or os.devnull).rglob("*"))


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
