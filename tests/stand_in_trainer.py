"""Stand-in for `facility.train` in tests of what surrounds it: same arguments, no torch, ends in milliseconds.

What it does is named by $STAND_IN: `train` (the default; writes an update), `wait` (says "step" and sleeps), `raise`,
`nothing` (exit 0 without an update), `come-back` (on SIGUSR1), `wrong-round`, `code:N`. A file `seconds` in the dataset
says how long it takes; one named `until` names a file, without which it does not end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    p = argparse.ArgumentParser()
    for name in ("model", "dataset", "settings", "out", "state"):
        p.add_argument(f"--{name}", type=Path, required=True)
    p.add_argument("--round", type=int, required=True)
    p.add_argument("--progress", action="store_true")
    p.add_argument("--steps", type=int, default=1)
    a = p.parse_args()
    rank, mode = os.environ["RANK"], os.environ.get("STAND_IN", "train")
    if mode.startswith("rank1:") and rank != "1":
        mode = "wait"
    mode = mode.removeprefix("rank1:")
    if mode == "wait":
        print("step", flush=True)
        time.sleep(600)
    if mode == "raise":
        raise RuntimeError("the stand-in was told to fail")
    if mode == "come-back":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
        print("step", flush=True)
        time.sleep(600)
    if mode.startswith("code:"):
        return int(mode.removeprefix("code:"))
    if mode == "nothing" or rank != "0":
        return 0
    write_update(a, mode)
    return 0


def write_update(a: argparse.Namespace, mode: str) -> None:
    """The model as it was received, with a report. What it needs is imported here alone: that takes ten times as long
    as all that the other modes do."""
    from facility.exchange.files.durable import new_directory
    from facility.exchange.messages import report
    from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
    from facility.exchange.messages.settings import read_facility_settings

    settings = read_facility_settings(a.settings)
    verify_manifest(a.model)
    if (pace := a.dataset / "seconds").is_file():
        time.sleep(float(pace.read_text()))
    awaited = Path(until.read_text()) if (until := a.dataset / "until").is_file() else a.model
    deadline = time.monotonic() + 600
    while not awaited.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    print("step", flush=True)  # also to a coordinator that is gone
    with new_directory(a.out) as out:
        (out / "model.safetensors").write_bytes((a.model / "model.safetensors").read_bytes())
        figures = dict(
            loss_received=2.0, loss_returned=1.0, perplexity_received=7.4, perplexity_returned=2.7, training_loss=1.5
        )
        report.write(
            out,
            report.Report(
                federation=settings.federation,
                facility=settings.facility,
                round=a.round,
                samples=1,
                tokens=1,
                steps=a.steps,
                **figures,
            ),
        )
        manifest = Manifest(
            kind="update",
            federation=settings.federation,
            facility=settings.facility,
            round=a.round + (mode == "wrong-round"),
            base_sha256=read_manifest(a.model).content_sha256,
        )
        write_manifest(out, manifest)


if __name__ == "__main__":
    sys.exit(main())
