"""`python -m facility.selfcheck`: train a pico model for three steps as a federation's job would; report the result.

With `--template` the job goes through the template's queue (sbatch, qsub or flux, by its directives), and this command
waits for it; without, it runs here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from facility.dataset import NAME, DatasetManifest, SplitEntry
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import CrossFedError, InputError, exit_on_error, for_terminal
from facility.exchange.files.storage import name_in_errors
from facility.exchange.logs import add_log_options
from facility.exchange.messages import report
from facility.exchange.messages.job_template import Environment, fill_template
from facility.exchange.messages.manifest import Manifest, sha256_of, verify_manifest, write_manifest
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.template_inheritance import read_template, script_of
from facility.exchange.text import number_of
from facility.installed import requirement_problems

log = logging.getLogger("facility.selfcheck")

SUBMIT = {
    "#SBATCH": ["sbatch", "--wait", "--time=00:10:00", "--job-name=crossfed-selfcheck"],
    "#PBS": ["qsub", "-W", "block=true", "-j", "oe"],
    "#$ ": ["qsub", "-sync", "y", "-j", "y", "-cwd"],
    "#flux:": ["flux", "batch", "--time-limit=10m"],
}
"""How a template with these directives is submitted. All but `flux batch` wait for the job's end."""
WAIT = {"flux": ["flux", "job", "status"]}
"""What waits for the end of the job whose id follows, and ends with its exit code."""
ATTEMPTS, ATTEMPT_SECONDS = 20, 0.25
"""How often, and how far apart, to look again for what a queue brings a while after a job has ended."""


def trial_settings(ranks: int) -> FacilitySettings:
    """Settings for three steps. Raises `ConfigurationError` for a number of ranks that cannot be started."""
    training = TrainingSettings(steps=3, batch_sequences=16, learning_rate=1e-2, ranks=ranks)
    return FacilitySettings(federation="selfcheck", facility="here", rounds=1, seed=1, training=training)


def make_material(folder: Path, settings: FacilitySettings) -> None:
    """A pico Llama, a prepared dataset of numbers, the settings."""
    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    disable_progress_bar()
    with name_in_errors(folder):
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_manifest(folder / "model", Manifest(kind="model", federation="selfcheck", round=0))
    data, splits = folder / "data", {}
    data.mkdir()
    for split, blocks in (("train", 64), ("validation", 16)):
        np.save(data / f"{split}.npy", (np.arange(blocks * 16, dtype=np.int32).reshape(blocks, 16) * 3) % 64)
        splits[split] = SplitEntry(
            blocks=blocks,
            documents=blocks,
            empty_documents=0,
            tokens=blocks * 16,
            tail_tokens=0,
            sha256=sha256_of(data / f"{split}.npy"),
        )
    manifest = DatasetManifest(
        task="causal-lm",
        block_tokens=16,
        vocabulary_size=64,
        tokenizer_sha256="0" * 64,
        template="{text}",
        splits=splits,
        sources=[],
    )
    (data / NAME).write_text(json.dumps(dataclasses.asdict(manifest)), encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)), encoding="utf-8")


def command(folder: Path) -> str:
    """The shell command of the job, as the workflow engine would write it."""
    words = [sys.executable, "-m", "facility.round", "--model", "../model", "--dataset", str(folder / "data")]
    words += ["--settings", "../settings.json", "--round", "0", "--out", "update", "--state", str(folder / "state")]
    return f"cd {shlex.quote(str(folder / 'job'))} && {shlex.join(words)} 2>&1"


def run(folder: Path, template: Path | None, fill: dict[str, str], home: Path, limit_seconds: float) -> None:
    """Run the job and wait for it. Raises `InputError` with what the scheduler said."""
    if template is None:
        words, text = ["bash", "-s"], command(folder)
    else:
        text = fill_template(
            read_template(template),
            fill=fill,
            environment=Environment(home=str(home)),
            workdir=str(folder),
            name=template.name,
        )
        text = script_of(text, command(folder))
        words = next(
            (SUBMIT[mark] for mark in SUBMIT if re.search(f"^{re.escape(mark)}", text, re.MULTILINE)), ["bash", "-s"]
        )
        if shutil.which(words[0]) is None:
            raise InputError(
                f"{template.name} is for {words[0]}, which is not on the PATH here: run this on a login node"
            )
    queue = words[0] != "bash"  # a template without directives, such as ssh.sh, runs its command where it is
    log.info("running %s", f"in a job of the queue, by {words[0]}" if queue else f"here, on {platform.node()}")
    result = submitted(words, text, folder, limit_seconds)
    sys.stderr.write(result.stdout + result.stderr)
    if not (folder / "job" / "update").is_dir():
        said = result.stderr.strip() or printed(folder / "job") or result.stdout
        last = for_terminal(" ".join(said.strip().splitlines()[-3:]))
        raise InputError(f"the job left no update ({words[0]} ended with {result.returncode}): {last}")


def submitted(words: list[str], text: str, folder: Path, limit_seconds: float) -> subprocess.CompletedProcess[str]:
    """What the scheduler said of the script `text` until its job had ended. Raises `InputError` after the limit."""
    began = time.monotonic()

    def said(words: list[str], given: str) -> subprocess.CompletedProcess[str]:
        left = max(limit_seconds - (time.monotonic() - began), 1)
        return subprocess.run(
            words,
            input=given,
            text=True,
            errors="replace",
            capture_output=True,
            cwd=folder / "job",
            timeout=left,
        )

    try:
        result = said(words, text)
        if result.returncode == 0 and words[0] in WAIT:
            log.info("submitted as job %s", id := result.stdout.strip())
            result = said([*WAIT[words[0]], id], "")
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the job did not end within {limit_seconds:.0f} s (it may still wait in the queue); its directory is "
            f"{folder}"
        ) from None
    return result


def printed(job: Path, attempts: int = ATTEMPTS) -> str:
    """The last of what the job printed into a file of its directory; a queue may bring that after the job has ended."""
    for _ in range(attempts):
        if files := [path for path in job.iterdir() if path.is_file()]:
            with max(files, key=lambda path: path.stat().st_mtime).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                return file.read().decode(errors="replace")
        time.sleep(ATTEMPT_SECONDS)
    return ""


def verdict(folder: Path, seconds: float) -> str:
    """One line on what the job found. Raises `InputError` when it failed."""
    update = folder / "job" / "update"
    if (failure := report.read_failure(update)) is not None:
        raise InputError(f"the training step failed: {failure.reason}\n{failure.log_tail}")
    verify_manifest(update)
    trained = report.read_report(update)
    if not trained.loss_returned < trained.loss_received:
        raise InputError(
            f"three steps did not lower the loss: {trained.loss_received:.3f} to {trained.loss_returned:.3f}"
        )
    devices = ", ".join(sorted(set(trained.devices))) or "unknown device"
    loss = f"loss {trained.loss_received:.3f} to {trained.loss_returned:.3f}"
    return f"{number_of(trained.ranks, 'rank')} on {devices}, {loss} in three steps, {seconds:.0f} s in all"


def removed(folder: Path) -> bool:
    """Remove it, though a queue may bring what the job printed after its end, as PBS does. True: it is gone."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return True
        time.sleep(ATTEMPT_SECONDS)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m facility.selfcheck", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home",
        type=Path,
        required=True,
        metavar="DIR",
        help="the facility's CrossFed directory; its nodes must see it",
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="job template; default: run here, without a queue"
    )
    parser.add_argument(
        "--fill", action="append", default=[], metavar="NAME=VALUE", help="value of one of its placeholders (repeat)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks where no scheduler says (default 1)")
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="SECONDS", help="how long to wait for the job (default 3600)"
    )
    add_log_options(parser)
    arguments = parse_arguments(parser)
    if arguments.fill and arguments.template is None:
        raise InputError("--fill has no effect without --template, whose placeholders it fills: leave it out")
    wrong = [item for item in arguments.fill if "=" not in item]
    if wrong:
        raise InputError(f"--fill is {wrong[0]!r}, expected NAME=VALUE")
    if not arguments.limit > 0:
        raise InputError(f"--limit is {arguments.limit:g} s, expected more than 0: how long to wait for the job")
    fill = dict(item.split("=", 1) for item in arguments.fill)
    settings = trial_settings(arguments.ranks)
    folder = arguments.home.resolve() / f"selfcheck-{uuid.uuid4().hex[:8]}"
    (folder / "job").mkdir(parents=True)
    began = time.monotonic()
    for problem in requirement_problems():
        log.warning("%s: a job that needs it may fail", problem)
    try:
        make_material(folder, settings)
        run(folder, arguments.template, fill, arguments.home.resolve(), arguments.limit)
        print(verdict(folder, time.monotonic() - began))
    except (CrossFedError, OSError, KeyboardInterrupt):
        print(f"what the job left is in {folder}", file=sys.stderr)
        raise
    if not removed(folder):
        log.warning("%s: something still writes there; remove it later", folder)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, level="info"))
