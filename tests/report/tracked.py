"""Feed a tracker with a made-up federation and print what the tracker's own package then reads, as JSON.

`python -m tests.report.tracked mlflow|wandb FOLDER`, run where the package is installed.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.report.trackers import FOLDER, curves, track_round
from tests.report.made import made_archive

BLOCK = 32768
SECONDS_APART = 1.1
"""Of rounds: W&B names the files of an offline run by the second."""
WHOLE, FIRST, LAST = 1, 2, 4


def mlflow_curves(folder: Path) -> dict[str, Any]:
    """Loss by run, from MLflow's own client."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    found = {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            history = client.get_metric_history(run.info.run_id, "loss_received")
            told = sorted((one.step, one.value) for one in history)
            assert run.info.run_name not in found, "a second run of the same name"
            found[run.info.run_name] = told
    return found


def wandb_curves(folder: Path) -> dict[str, Any]:
    """Loss by run, from the files that W&B leaves for `wandb sync`; each round is a file of its own."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            told = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss_received" in told:
                name = path.stem.removeprefix("run-")
                found.setdefault(name, []).append((int(told["_step"]), json.loads(told["loss_received"])))
    return found


def _records(content: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format, after W&B's own seven bytes: blocks of 32 KiB; CRC, length and kind before each part."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (WHOLE, LAST):
            yield parts


def main() -> None:
    tracker, root = sys.argv[1], Path(sys.argv[2])
    archive = made_archive(root / "archive", facilities=2, rounds=3)
    history = archive.history()
    problems = []
    for entry in history:
        problems += track_round(archive.path, "made", [tracker], entry)
        time.sleep(SECONDS_APART)
    expected: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for run, figures in curves(entry).items():
            expected.setdefault(f"made-{run}", []).append((entry.round, figures["loss_received"]))
    read = {"mlflow": mlflow_curves, "wandb": wandb_curves}[tracker](archive.path / FOLDER)
    print(json.dumps({"problems": problems, "expected": expected, "found": read}))


if __name__ == "__main__":
    main()
