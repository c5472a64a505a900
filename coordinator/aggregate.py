"""Combine the updates of a round into the next model.

    python -m coordinator.aggregate --base DIR --update DIR [--update DIR ...] --out DIR [--state-out DIR]

`--out` becomes a Hugging Face checkpoint in the base's dtypes, `--state-out` the float32 master and the server
optimiser's tensors, to be given as `--state-in` next time. Both appear whole or not at all, the state first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coordinator.averaging import kernel
from coordinator.averaging.outers import SLOT_NAMES, outer_of
from coordinator.averaging.patterns import Patterns
from coordinator.averaging.record import ROUND, Participant, RoundRecord, write_record
from coordinator.averaging.settings import AggregationSettings
from coordinator.averaging.updates import open_updates, weights_of
from facility.exchange.checkpoint import FLOATS, Checkpoint, open_checkpoint
from facility.exchange.durable import new_directory
from facility.exchange.errors import CheckpointError, ConfigurationError, UpdateRefused, exit_on_error
from facility.exchange.manifest import NAME, Manifest, read_manifest, verify_manifest, write_manifest
from facility.exchange.settings import from_mapping
from facility.exchange.writer import TensorWriter, layout_like

OUTPUT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MASTER = "master"


def aggregate(
    *,
    base: Path,
    updates: Sequence[Path],
    out: Path,
    settings: AggregationSettings | None = None,
    state_in: Path | None = None,
    state_out: Path | None = None,
    record: Path | None = None,
    threads: int = 0,
) -> RoundRecord:
    """Write the next model to `out` and the state to `state_out`; neither may exist. Returns what round.json says.

    round.json is written to `record`, by default into `state_out`, else beside `out` as `<out>.round.json`; never into
    the model, which travels to every facility. Raises `UpdateRefused` naming the facility, or another
    `CrossFedError`; then nothing is left behind.
    """
    settings = settings or AggregationSettings()
    started = time.perf_counter()
    base_checkpoint = open_checkpoint(base)
    base_manifest = read_manifest(base) if (Path(base) / NAME).exists() else None
    opened = open_updates(updates, base_checkpoint, base_manifest, settings)
    weights = weights_of(opened, settings)
    patterns = Patterns(tuple(settings.include), tuple(settings.exclude))
    floats = {
        name: entry
        for name, entry in base_checkpoint.tensors.items()
        if entry.dtype in FLOATS and patterns.federated(name)
    }
    if not floats:
        raise ConfigurationError("include and exclude leave no floating-point tensor to federate")
    dtypes = {
        name: OUTPUT.get(settings.output_dtype, entry.dtype) if entry.dtype in FLOATS else entry.dtype
        for name, entry in base_checkpoint.tensors.items()
    }
    masters = {name: "F64" if entry.dtype == "F64" else "F32" for name, entry in floats.items()}
    outer, starts = outer_of(settings)
    slot_names = SLOT_NAMES[settings.outer]
    old = _open_state(state_in, base_manifest, [MASTER, *slot_names])
    threads = threads or min(2, os.cpu_count() or 1)
    opened_seconds = time.perf_counter()

    with ExitStack() as stack:
        model_directory = stack.enter_context(new_directory(out))
        state_directory = stack.enter_context(new_directory(state_out)) if state_out else None
        writers = stack.enter_context(ExitStack())

        def writer(directory: Path, layout_dtypes: dict[str, str], metadata: dict[str, str]) -> TensorWriter:
            directory.mkdir(exist_ok=True)
            return writers.enter_context(TensorWriter(directory, layout_like(base_checkpoint, layout_dtypes), metadata))

        model_writer = writer(model_directory, dtypes, base_checkpoint.metadata)
        master_writer, slot_writers = None, []
        if state_directory is not None:
            master_writer = writer(state_directory / MASTER, masters, {"format": "pt"})
            slot_writers = [writer(state_directory / name, masters, {"format": "pt"}) for name in slot_names]
        work = kernel.Work(
            base=floats,
            updates=[update.entries for update in opened],
            coefficients=weights,
            master=_fitting(old.get(MASTER), floats),
            slots=[_fitting(old.get(name), floats) for name in slot_names],
            slot_starts=starts,
            outer=None if settings.outer == "plain" and settings.server_learning_rate == 1 else outer,
            float64=settings.accumulate == "float64",
            statistics=settings.statistics,
            model=model_writer,
            new_master=master_writer,
            new_slots=slot_writers,
        )
        try:
            passed = kernel.run(work, threads=threads)
        except kernel.NotFinite as error:
            if error.update is None:
                raise
            raise UpdateRefused(
                opened[error.update].facility, f"tensor {error.name!r} holds NaN, infinity or absurdly large values"
            ) from None
        for number, update in enumerate(opened):
            if not math.isfinite(passed.gram[number, number]):
                raise UpdateRefused(update.facility, "it holds NaN, infinity or absurdly large values")
        for name in base_checkpoint.tensors.keys() - floats.keys():
            _copy_tensor(base_checkpoint, name, model_writer, dtypes[name])
        streamed = time.perf_counter()
        writers.close()
        copy_companions(Path(base), model_directory)
        result = _record(opened, weights, settings, passed, base_checkpoint, base_manifest, floats, dtypes, threads)
        if base_manifest:
            write_manifest(
                model_directory,
                Manifest(
                    kind="model",
                    federation=base_manifest.federation,
                    round=base_manifest.round + 1,
                    dtypes=open_checkpoint(model_directory).dtypes(),
                    parameters=base_checkpoint.parameters,
                    extra={"rule": settings.rule},
                ),
            )
        hashed = time.perf_counter()
        result = dataclasses.replace(
            result,
            seconds={
                "open": round(opened_seconds - started, 4),
                "stream": round(streamed - opened_seconds, 4),
                "hash": round(hashed - streamed, 4),
            },
        )
        if state_directory is not None:
            write_record(state_directory / ROUND, result)
            write_manifest(
                state_directory,
                Manifest(
                    kind="state",
                    federation=result.federation,
                    round=result.round + 1,
                    dtypes={},
                    parameters=base_checkpoint.parameters,
                    extra={"outer": settings.outer},
                ),
            )
    if record or state_out is None:
        write_record(Path(record) if record else Path(out).with_name(Path(out).name + f".{ROUND}"), result)
    return result


def _open_state(state: Path | None, base_manifest: Manifest | None, names: Sequence[str]) -> dict[str, Checkpoint]:
    """The checkpoints of a state directory that this rule needs; those it lacks start afresh."""
    if state is None:
        return {}
    manifest = verify_manifest(state)
    if manifest.kind != "state":
        raise CheckpointError(f"{state} is a {manifest.kind!r}, expected the state of the round before")
    if base_manifest and (manifest.round, manifest.federation) != (base_manifest.round, base_manifest.federation):
        raise CheckpointError(
            f"{state} is the state for round {manifest.round} of {manifest.federation!r}, "
            f"but the base is the model of round {base_manifest.round} of {base_manifest.federation!r}"
        )
    return {name: open_checkpoint(Path(state) / name) for name in names if (Path(state) / name).is_dir()}


def _fitting(checkpoint: Checkpoint | None, floats: dict[str, Any]) -> dict[str, Any]:
    """The state's tensors for the federated ones; a tensor that was not federated before starts from the base."""
    if checkpoint is None:
        return {}
    for name in floats.keys() & checkpoint.tensors.keys():
        if checkpoint.tensors[name].shape != floats[name].shape:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {name!r} has shape {list(checkpoint.tensors[name].shape)}, "
                f"the base has {list(floats[name].shape)}: the state is of another model"
            )
    return {name: checkpoint.tensors[name] for name in floats if name in checkpoint.tensors}


def _copy_tensor(checkpoint: Checkpoint, name: str, writer: TensorWriter, dtype: str) -> None:
    """Take a tensor that is not federated from the base, streaming."""
    entry = checkpoint.tensors[name]
    if dtype != entry.dtype:
        kernel.run(
            kernel.Work(
                base={name: entry}, updates=[{name: entry}], coefficients=[1.0], statistics="off", model=writer
            ),
            threads=1,
        )
        return
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, 8 << 20):
            size = min(8 << 20, entry.size - offset)
            file.seek(entry.start + offset)
            writer.write(name, offset, memoryview(file.read(size)))


def copy_companions(source: Path, target: Path) -> None:
    """Copy everything of a checkpoint directory that is not tensors: configuration, tokenizer, generation settings."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in (".safetensors", ".bin") and path.name != NAME:
            if not path.name.endswith(".index.json") and path.name not in (ROUND, "report.json"):
                shutil.copyfile(path, target / path.name)


def _record(
    opened: Sequence[Any],
    weights: Sequence[float],
    settings: AggregationSettings,
    passed: kernel.Passed,
    base: Checkpoint,
    base_manifest: Manifest | None,
    floats: dict[str, Any],
    dtypes: dict[str, str],
    threads: int,
) -> RoundRecord:
    counted = settings.statistics != "off"
    gram = passed.gram
    norms = [math.sqrt(max(gram[i, i], 0.0)) for i in range(len(opened))]
    mean_norm = math.sqrt(max(float(np.asarray(weights) @ gram @ np.asarray(weights)), 0.0)) if counted else None

    def cosine(product: float, one: float, two: float) -> float:
        return round(product / (one * two), 6) if one and two else 0.0

    participants = [
        Participant(
            facility=update.facility,
            weight=weights[i],
            coefficient=weights[i],
            tokens=update.report.tokens if update.report else 0,
            samples=update.report.samples if update.report else 0,
            staleness=update.staleness,
            norm=norms[i] if counted else None,
            cosine_to_mean=cosine(float(gram[i] @ np.asarray(weights)), norms[i], mean_norm or 0.0)
            if counted
            else None,
            cosines={
                other.facility: cosine(float(gram[i, j]), norms[i], norms[j])
                for j, other in enumerate(opened)
                if counted and j != i
            },
        )
        for i, update in enumerate(opened)
    ]
    decisions: dict[str, str] = {}
    for name, entry in floats.items():
        sources = sorted({update.entries[name].dtype for update in opened})
        key = f"{'+'.join(sources)} -> {dtypes[name]}"
        why = "as in the base model" if dtypes[name] == entry.dtype else f"output_dtype is {settings.output_dtype}"
        decisions[key] = f"{why}; summed in {settings.accumulate}"
    tensors = base.tensors
    return RoundRecord(
        federation=base_manifest.federation if base_manifest else "",
        round=base_manifest.round if base_manifest else 0,
        rule=settings.rule,
        combiner=settings.combiner,
        outer=settings.outer,
        participants=participants,
        tensors_matched=len(floats),
        tensors_personal=sum(1 for name, e in tensors.items() if e.dtype in FLOATS and name not in floats),
        tensors_copied=sum(1 for e in tensors.values() if e.dtype not in FLOATS),
        parameters=passed.elements,
        dtypes=decisions,
        mean_norm=mean_norm,
        statistics=settings.statistics,
        settings=dataclasses.asdict(settings),
        bytes_read=passed.bytes_read,
        bytes_written=passed.bytes_written,
        threads=threads,
    )


def read_settings(path: Path | None, rule: str | None) -> AggregationSettings:
    """Settings from a YAML or JSON file (a whole federation.yml, or its `aggregation:` section), then the rule."""
    raw: Any = {}
    if path is not None:
        try:
            raw = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigurationError(f"cannot be read: {error}", file=path) from None
        if isinstance(raw, dict) and "aggregation" in raw:
            raw = raw["aggregation"]
    settings = from_mapping(AggregationSettings, raw, where="", file=path)
    return dataclasses.replace(settings, rule=rule) if rule else settings


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m coordinator.aggregate", description=__doc__.split("\n\n")[0])
    p.add_argument("--base", type=Path, required=True, metavar="DIR", help="model that the updates started from")
    p.add_argument("--update", type=Path, action="append", default=[], metavar="DIR", help="one update; repeat")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="next model; must not exist")
    p.add_argument("--rule", metavar="NAME", help="overrides the settings' rule (default: mean)")
    p.add_argument("--state-in", type=Path, metavar="DIR", help="state of the round before (default: start from base)")
    p.add_argument("--state-out", type=Path, metavar="DIR", help="float32 master and optimiser tensors; must not exist")
    p.add_argument("--settings", type=Path, metavar="FILE", help="YAML or JSON with the aggregation settings")
    p.add_argument(
        "--record", type=Path, metavar="FILE", help="round.json (default: in --state-out, or <out>.round.json)"
    )
    p.add_argument("--threads", type=int, default=0, help="worker threads (default: 0, as many as pay: at most 2)")
    p.add_argument("--json", action="store_true", help="print the record as JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    record = aggregate(
        base=a.base,
        updates=a.update,
        out=a.out,
        settings=read_settings(a.settings, a.rule),
        state_in=a.state_in,
        state_out=a.state_out,
        record=a.record,
        threads=a.threads,
    )
    if a.json:
        print(json.dumps(dataclasses.asdict(record), indent=2))
    else:
        names = ", ".join(f"{p.facility} {p.weight:.3f}" for p in record.participants)
        print(f"{a.out}: {record.rule} of {len(record.participants)} updates ({names})")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
