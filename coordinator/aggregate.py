"""Combine the updates of a round into the next model.

    python -m coordinator.aggregate --base DIR --update DIR [--update DIR ...] --out DIR [--state-out DIR]

`--out` becomes a Hugging Face checkpoint in the base's dtypes, `--state-out` the float32 master and the server
optimiser's tensors, to be given as `--state-in` next time. Both appear whole or not at all, the state first.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coordinator.aggregation import kernel
from coordinator.aggregation import outliers as screen
from coordinator.aggregation.adapters import adapter_base, are_adapters, errors, layout_with, write_products
from coordinator.aggregation.describe import describe
from coordinator.aggregation.plan import make_plan, needs_histograms, needs_measuring
from coordinator.aggregation.record import ROUND, RoundRecord, write_record
from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers import plain
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS, build
from coordinator.aggregation.state import MASTER, fitting, make_way, open_state, seal
from coordinator.aggregation.updates import Update, open_updates, weights_of
from coordinator.config.aggregation import AggregationSettings
from facility.exchange.checkpoints import magnitudes
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import ConfigurationError, TryAgain, UpdateRefused, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, write_manifest
from facility.exchange.validation import parse

ADAPTERS = "adapter_config.json"
OUTPUT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


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
    with _clear_about_space(out):
        return _aggregate(base, updates, out, settings or read_settings(), state_in, state_out, record, threads)


@contextmanager
def _clear_about_space(out: Path) -> Iterator[None]:
    """A full disk, quota or file-size limit as one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(Path(out).absolute().parent).free
        raise TryAgain(
            f"{out} could not be written: {error.strerror} ({free / 1e6:.0f} MB are free there); nothing was left behind, "
            "make space and run the same command again"
        ) from None


def _aggregate(
    base: Path,
    updates: Sequence[Path],
    out: Path,
    settings: AggregationSettings,
    state_in: Path | None,
    state_out: Path | None,
    record: Path | None,
    threads: int,
) -> RoundRecord:
    started = time.perf_counter()
    make_way(state_out, out)
    source = whole = open_checkpoint(base)
    sent = read_manifest(base) if (Path(base) / NAME).exists() else None
    with tempfile.TemporaryDirectory(prefix=".adapters.") as scratch:
        if with_adapters := are_adapters(updates):
            source, begun = adapter_base(whole, updates, Path(scratch))
            if begun:  # there is no step yet that a server optimiser could take
                settings = settings.without_optimizer()
        return _combine(
            whole, source, sent, updates, out, settings, state_in, state_out, record, threads, started, with_adapters
        )


def _combine(
    whole: Checkpoint,
    source: Checkpoint,
    sent: Manifest | None,
    updates: Sequence[Path],
    out: Path,
    settings: AggregationSettings,
    state_in: Path | None,
    state_out: Path | None,
    record: Path | None,
    threads: int,
    started: float,
    with_adapters: bool,
) -> RoundRecord:
    """`whole` is the model that was sent, `source` the tensors of it that updates hold."""
    opened = open_updates(updates, source, sent, settings)
    weights = weights_of(opened, settings)
    patterns = Patterns(tuple(settings.include), tuple(settings.exclude))
    floats = {n: e for n, e in source.tensors.items() if e.dtype in FLOATS and patterns.federated(n)}
    if not floats:
        raise ConfigurationError("include and exclude leave no floating-point tensor to federate")
    number = sent.round if sent else 0
    threads = threads or min(2, os.cpu_count() or 1)
    seconds = {"open": time.perf_counter() - started}

    measured, histograms = None, None
    product = with_adapters and settings.lora == "product"
    if needs_measuring(settings) or product:
        measured, histograms = _measure(opened, floats, settings, threads)
        seconds["measure"] = time.perf_counter() - started - sum(seconds.values())
    names = [update.facility for update in opened]
    suspects: dict[str, str] = {}
    quarantined: dict[str, str] = {}
    if measured is not None:
        suspects = screen.suspects(names, measured.gram, weights, settings.screen)
        kept = screen.quarantined(names, suspects, settings.screen)
        if len(kept) < len(names):
            quarantined = suspects
            opened = [opened[i] for i in kept]
            weights, names = weights_of(opened, settings), [names[i] for i in kept]
            histograms = [histograms[i] for i in kept] if histograms else None
            measured = dataclasses.replace(measured, gram=measured.gram[np.ix_(kept, kept)])
    plan = make_plan(
        settings,
        names,
        weights,
        gram=measured.gram if measured else None,
        histograms=histograms,
        round=number,
    )

    if with_adapters:
        plan = dataclasses.replace(plan, details=plan.details | {"lora": settings.lora} | errors(opened, weights))
    optimizer = SERVER_OPTIMIZERS.get(settings.server_optimizer)
    outer, starts = build(settings.server_optimizer, number, settings.values_of(optimizer))
    slot_names = optimizer.slots
    old = open_state(state_in, sent, [MASTER, *slot_names])
    dtypes = {
        name: OUTPUT.get(settings.output_dtype, entry.dtype) if entry.dtype in FLOATS else entry.dtype
        for name, entry in source.tensors.items()
    }
    full = {name: "F64" if entry.dtype == "F64" else "F32" for name, entry in floats.items()}
    with ExitStack() as stack:
        model_directory = stack.enter_context(new_directory(out))
        state_directory = stack.enter_context(new_directory(state_out)) if state_out else None
        with ExitStack() as writers:

            def writer(directory: Path, kinds: Mapping[str, str], metadata: Mapping[str, str]) -> TensorWriter:
                directory.mkdir(exist_ok=True)
                return writers.enter_context(TensorWriter(directory, layout_like(source, kinds), metadata))

            model = writers.enter_context(
                TensorWriter(model_directory, layout_with(whole, source, dtypes), whole.metadata)
            )
            master, slots = None, []
            if state_directory is not None:
                master = writer(state_directory / MASTER, full, {"format": "pt"})
                slots = [writer(state_directory / name, full, {"format": "pt"}) for name in slot_names]
            work = kernel.Work(
                base=floats,
                updates=[update.entries for update in opened],
                coefficients=plan.coefficients,
                combine=plan.combine,
                master=fitting(old.get(MASTER), floats),
                slots=[fitting(old.get(name), floats) for name in slot_names],
                slot_starts=starts,
                outer=None if outer is plain.add else outer,
                float64=settings.accumulate == "float64",
                statistics="off" if measured and settings.statistics != "exact" else settings.statistics,
                model=model,
                new_master=master,
                new_slots=slots,
            )
            if product:
                assert measured is not None
                write_products(opened, weights, model, master)
                passed = measured
            else:
                passed = _run(work, opened, threads)
            for name in sorted(whole.tensors.keys() - floats.keys()):
                _copy_tensor(whole, name, model, dtypes.get(name, whole.tensors[name].dtype))
        seconds["stream"] = time.perf_counter() - started - sum(seconds.values())
        if measured is None and settings.statistics == "exact":
            suspects = screen.suspects(names, passed.gram, weights, settings.screen)
        copy_companions(whole.directory, model_directory)
        if with_adapters and not (model_directory / ADAPTERS).exists():
            shutil.copyfile(opened[0].directory / ADAPTERS, model_directory / ADAPTERS)
        result = describe(
            opened=opened,
            weights=weights,
            settings=settings,
            plan=plan,
            measured=measured,
            passed=passed,
            base=whole,
            base_manifest=sent,
            floats=floats,
            dtypes=dtypes,
            suspects=suspects,
            quarantined=quarantined,
            threads=threads,
        )
        made = _seal_model(model_directory, sent, settings) if sent else None
        seconds["hash"] = time.perf_counter() - started - sum(seconds.values())
        result = dataclasses.replace(result, seconds={name: round(value, 4) for name, value in seconds.items()})
        if state_directory is not None:
            write_record(state_directory / ROUND, result)
            seal(
                state_directory,
                federation=result.federation,
                round=result.round + 1,
                outer=settings.server_optimizer,
                parameters=source.parameters,
                model=made,
                model_path=Path(out),
            )
        if record or state_out is None:
            write_record(Path(record) if record else Path(out).with_name(Path(out).name + f".{ROUND}"), result)
    return result


def _measure(
    opened: Sequence[Update], floats: Mapping[str, TensorEntry], settings: AggregationSettings, threads: int
) -> tuple[kernel.Passed, list[Any] | None]:
    """One pass that only looks: inner products of the steps, and histograms where the rule wants them."""
    histograms = [np.zeros(magnitudes.BINS, np.int64) for _ in opened]
    lock = threading.Lock()

    def observe(steps: Any) -> None:
        for total, row in zip(histograms, steps, strict=True):
            counts = magnitudes.histogram(row)
            with lock:
                total += counts

    wanted = needs_histograms(settings)
    work = kernel.Work(
        base=floats,
        updates=[update.entries for update in opened],
        float64=settings.accumulate == "float64",
        observe=observe if wanted else None,
    )
    measured = _run(work, opened, threads)
    return measured, histograms if wanted else None


def _run(work: kernel.Work, opened: Sequence[Update], threads: int) -> kernel.Passed:
    """A pass whose faults name the facility."""
    try:
        passed = kernel.run(work, threads=threads)
    except kernel.NotFinite as error:
        if error.update is None:
            raise
        raise UpdateRefused(
            opened[error.update].facility, f"tensor {error.name!r} holds NaN, infinity or absurdly large values"
        ) from None
    for update, squared in zip(opened, passed.gram.diagonal(), strict=True):
        if not np.isfinite(squared):
            raise UpdateRefused(update.facility, "it holds NaN, infinity or absurdly large values")
    return passed


def _seal_model(directory: Path, sent: Manifest, settings: AggregationSettings) -> Manifest:
    made = open_checkpoint(directory)
    return write_manifest(
        directory,
        Manifest(
            kind="model",
            federation=sent.federation,
            round=sent.round + 1,
            dtypes=made.dtypes(),
            parameters=made.parameters,
            extra={"rule": settings.rule},
        ),
    )


def _copy_tensor(checkpoint: Checkpoint, name: str, writer: TensorWriter, dtype: str) -> None:
    """Take a tensor that is not federated from the base, streaming."""
    entry = checkpoint.tensors[name]
    if dtype != entry.dtype:
        same = {name: entry}
        kernel.run(
            kernel.Work(base=same, updates=[same], coefficients=[1.0], statistics="off", model=writer), threads=1
        )
        return
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, 8 << 20):
            file.seek(entry.start + offset)
            writer.write(name, offset, memoryview(file.read(min(8 << 20, entry.size - offset))))


def copy_companions(source: Path, target: Path) -> None:
    """Copy everything of a checkpoint directory that is not tensors: configuration, tokenizer, generation settings."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in (".safetensors", ".bin") and path.name != NAME:
            if not path.name.endswith(".index.json") and path.name not in (ROUND, "report.json"):
                shutil.copyfile(path, target / path.name)


def read_settings(path: Path | None = None, rule: str | None = None, weights: str | None = None) -> AggregationSettings:
    """Settings from a YAML or JSON file (a whole federation.yml, or its `aggregation:` section), then the overrides.

    Without a file there may be no next round that a momentum could help: the plain mean.
    """
    raw: Any = {"rule": "mean"}
    if path is not None:
        try:
            raw = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigurationError(f"cannot be read: {error}", file=path) from None
        if isinstance(raw, dict) and "aggregation" in raw:
            raw = raw["aggregation"]
    if isinstance(raw, dict):
        raw = raw | ({"rule": rule} if rule else {}) | ({"weights": weights} if weights else {})
    return parse(AggregationSettings, raw, where="", file=path)


def rule_help() -> str:
    """The names that `--rule` takes, from the registries."""
    return (
        f"aggregation rule ({', '.join(RULES.names())}), server optimizer ({', '.join(SERVER_OPTIMIZERS.names())}), one of "
        "each joined by '+', or the dotted path of your own; overrides the settings' rule (default: mean, or the file's)"
    )


def parser() -> argparse.ArgumentParser:
    assert __doc__
    p = argparse.ArgumentParser(prog="python -m coordinator.aggregate", description=__doc__.split("\n\n")[0])
    p.add_argument("--base", type=Path, required=True, metavar="DIR", help="model that the updates started from")
    p.add_argument("--update", type=Path, action="append", default=[], metavar="DIR", help="one update; repeat")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="next model; must not exist")
    p.add_argument("--rule", metavar="NAME", help=rule_help())
    p.add_argument(
        "--weights",
        choices=("tokens", "samples", "equal"),
        help="what an update counts: its report's tokens or samples, or the same for all (default: tokens)",
    )
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
        settings=read_settings(a.settings, a.rule, a.weights),
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
        for facility, reason in (record.quarantined | record.suspects).items():
            print(f"out of line: {facility}: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
