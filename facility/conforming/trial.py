"""Runs rounds of a trainer as a facility's job would: through the launcher, on a pico model and a pico dataset."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.files.links import copy_tree
from facility.exchange.json_values import values_in
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.messages.progress import FILE as PROGRESS
from facility.exchange.messages.progress import read_progress
from facility.exchange.messages.trainer import TrainerSettings
from facility.selfcheck import make_material, trial_settings

FEDERATION, FACILITY = "selfcheck", "here"
ROUNDS, STEPS = 2, 60
"""Enough steps that a signal arrives among them."""
KEPT_CHARACTERS = 2000
"""Of a failed round's output: as many as a finding shows."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A round that has ended."""

    code: int
    said: str
    """The end of what it printed."""
    update: Path
    """Where its update should be."""
    seconds: float
    signalled: bool = False


class Trial:
    """Rounds of one module, each in a directory of its own below `folder`, which is made.

    Raises `InputError` where `module` is not the name of a module, or `ranks` or `limit_seconds`, the longest time of a
    round, is not above 0; nothing is made then.
    """

    def __init__(self, folder: Path, module: str, *, ranks: int, limit_seconds: float) -> None:
        if not limit_seconds > 0:
            raise InputError(f"--limit is {limit_seconds:g} s, expected more than 0: the longest time of a round")
        TrainerSettings(module=module)
        self.folder, self.module, self.ranks, self.limit = folder, module, ranks, limit_seconds
        wanted = trial_settings(ranks)
        folder.mkdir(parents=True, exist_ok=True)
        make_material(folder, wanted)
        settings = folder / "settings.json"
        raw = values_in(settings)
        raw["training"] |= {"device": "cpu", "export_dtype": "float32", "steps": STEPS}
        settings.write_text(json.dumps(raw | {"rounds": ROUNDS}), encoding="utf-8")

    @property
    def model(self) -> Path:
        """The model of round 0."""
        return self.folder / "model"

    @property
    def next_model(self) -> Path:
        """The model of round 1."""
        return self.folder / "next"

    def run(self, place: str, *, model: Path, round: int, state: str = "state", stop_after: float = 0.0) -> Ended:
        """One round in the directory `place`; a second run there goes on in it.

        `stop_after`: send SIGTERM once the round trains, or after so many seconds where it does not say; 0: never.
        """
        directory = self.folder / place
        directory.mkdir(exist_ok=True)
        began, signalled = time.monotonic(), False
        with (directory / "output").open("w+b") as output:
            process = subprocess.Popen(
                self.command(model, round, state), cwd=directory, env=environment(), stdout=output, stderr=output
            )
            try:
                if stop_after:
                    signalled = stop_while_training(process, directory, stop_after)
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                raise InputError(
                    f"{self.module} did not end its round within {self.limit:.0f} s; give more by --limit"
                ) from None
            finally:
                process.kill()
                process.wait()
        said = (directory / "output").read_text(errors="replace", encoding="utf-8")[-KEPT_CHARACTERS:]
        seconds = time.monotonic() - began
        return Ended(code=code, said=said, update=directory / "update", seconds=seconds, signalled=signalled)

    def command(self, model: Path, round: int, state: str) -> list[str]:
        words = [sys.executable, "-m", "facility.launch", "--cpu", "--ranks", str(self.ranks), "--", "-m", self.module]
        options = {"model": model, "dataset": self.folder / "data", "settings": self.folder / "settings.json"}
        words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*words, "--round", str(round), "--out", "update", "--state", str(self.folder / state), "--progress"]

    def make_next_model(self, update: Path) -> None:
        """What a coordinator sends after a round with one facility: its update, as a model."""
        copy_tree(update, self.next_model)
        write_manifest(self.next_model, Manifest(kind="model", federation=FEDERATION, round=1))

    def tampered_model(self) -> Path:
        """The model of round 0 with one byte of its weights changed."""
        place = self.folder / "tampered"
        copy_tree(self.model, place)
        weights = next(place.glob("*.safetensors"))
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        return place

    def empty_model(self) -> Path:
        """A directory without a model."""
        place = self.folder / "empty"
        place.mkdir()
        return place


def stop_while_training(process: subprocess.Popen[bytes], directory: Path, seconds: float) -> bool:
    """Send SIGTERM as soon as the round reports its first step, at the latest after `seconds`; False where it has
    ended before."""
    latest = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > latest or steps_done(directory):
            process.send_signal(signal.SIGTERM)
            return True
        time.sleep(0.01)
    return False


def steps_done(directory: Path) -> int:
    """Steps that `progress.json` reports; 0 where there is none, or none that can be read."""
    try:
        return read_progress((directory / PROGRESS).read_text(encoding="utf-8")).step
    except (OSError, CrossFedError):
        return 0


def environment() -> dict[str, str]:
    """This environment; the working directory is among the places of modules, which are absolute."""
    found = ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(os.path.abspath, found)))}
