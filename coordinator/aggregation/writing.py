"""The fourth stage (`coordinator.aggregation.run`): stream the next model and state to disk.

Both appear atomically, the state first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation import kernel
from coordinator.aggregation.adapters import layout_with, settings_of, write_products
from coordinator.aggregation.factor_errors import FactorErrors
from coordinator.aggregation.masked_moments import write_unmasked_moments
from coordinator.aggregation.mean_walk import make_mean_walk
from coordinator.aggregation.moments import write_mean_moments
from coordinator.aggregation.plan import needs_momentum
from coordinator.aggregation.record import ROUND, RoundRecord, write_record
from coordinator.aggregation.request import Request
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.screening import run_pass, screen_afterwards
from coordinator.aggregation.second_moments import write_second_moments
from coordinator.aggregation.server_optimizers import plain
from coordinator.aggregation.server_optimizers.kept_arguments import with_kept_arguments
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS, build
from coordinator.aggregation.sources import Sources
from coordinator.aggregation.state import MASTER, fitting, kept_by, open_state, seal
from coordinator.aggregation.unchanged import known_files, link_unchanged, read_unchanged, write_unchanged
from coordinator.aggregation.work import Work
from facility.exchange.checkpoints.adapters import CONFIG, class_in, write_adapter_config
from facility.exchange.checkpoints.checkpoint import FLOATS, STORED_AS, TensorEntry, expect_tensors, open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions, state_dtype
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.files.checksum import Checksum
from facility.exchange.files.durable import new_directory
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.manifest import Manifest, tensor_files, write_manifest

COPY_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Temporary directories that take their names when the stage ends well."""

    model: Path
    state: Path | None


@contextmanager
def new_outputs(request: Request) -> Iterator[Outputs]:
    """The directories to write to. An error removes them."""
    with ExitStack() as stack:
        model = stack.enter_context(new_directory(request.out))
        state = stack.enter_context(new_directory(request.state_out)) if request.state_out else None
        yield Outputs(model=model, state=state)


def write_tensors(aggregation: Aggregation, outputs: Outputs) -> None:
    """Write every tensor of the model and the state, and the files beside them."""
    settings, whole = aggregation.settings, aggregation.whole
    aggregation.dtypes = {
        name: STORED_AS.get(settings.output_dtype, entry.dtype) if entry.dtype in FLOATS else entry.dtype
        for name, entry in aggregation.source.tensors.items()
    }
    with ExitStack() as stack:
        layout, sent = layout_with(whole, aggregation.source, aggregation.dtypes), aggregation.sent
        linked = link_unchanged(whole, sent, layout, aggregation.floats, outputs.model) if sent is not None else {}
        aggregation.linked = linked
        writer = TensorWriter(outputs.model, layout, whole.metadata, hashed=sent is not None, present=linked)
        model, errors = stack.enter_context(writer), _factor_errors(aggregation)
        work = _work(aggregation, outputs, stack, model)
        walk = make_mean_walk(aggregation, outputs.model, outputs.state, stack)
        work = dataclasses.replace(work, walk=walk, values=errors)
        if aggregation.with_adapters and settings.lora == "product":
            assert aggregation.measured is not None and errors is not None
            changed = _write_products(aggregation, model, work, errors)
            aggregation.passed = dataclasses.replace(aggregation.measured, step_squared=changed)
        else:
            aggregation.passed = run_pass(aggregation, work)
        aggregation.factor_errors = errors.describe() if errors is not None else {}
        _copy_others(aggregation, model, {tensor.name for file in linked for tensor in layout[file]})
        aggregation.clock("stream")
        aggregation.sources.check()
        aggregation.verified.update(aggregation.sources.facilities.values())
        aggregation.written = _written(outputs, model, [work.new_master, *work.new_slots])
        if sent is not None and aggregation.request.verify_base:
            digests = {name: sent.files[one.source].sha256 for name, one in linked.items()}
            aggregation.written[outputs.model] |= digests
            if outputs.state is not None:
                write_unchanged(outputs.state, outputs.model, linked, sent)
    aggregation.clock("hash")
    screen_afterwards(aggregation)
    copy_companions(whole.directory, outputs.model)
    if settings.output_dtype in STORED_AS and not aggregation.with_adapters:
        state_dtype(outputs.model, settings.output_dtype)
    if (unmasking := aggregation.request.unmasking) is not None:
        write_unmasked_moments(aggregation, outputs.model, unmasking)
    else:
        write_second_moments(aggregation, outputs.model)
        write_mean_moments(aggregation, outputs.model)
    if aggregation.with_adapters and not (outputs.model / CONFIG).exists():
        agreed = settings_of(aggregation.opened, aggregation.request.adapters)
        write_adapter_config(outputs.model, agreed, aggregation.source.tensors, model_class=class_in(outputs.model))


def _written(outputs: Outputs, model: TensorWriter, state: Sequence[TensorWriter | None]) -> dict[Path, dict[str, str]]:
    """Digests of what was written, by directory and name in it."""
    found = {outputs.model: model.digests()}
    if outputs.state is not None:
        found[outputs.state] = {
            f"{writer.directory.name}/{name}": digest
            for writer in state
            if writer is not None
            for name, digest in writer.digests().items()
        }
    return found


def seal_outputs(aggregation: Aggregation, outputs: Outputs, record: RoundRecord) -> RoundRecord:
    """Write the manifests and round.json, last of all; returns the record with its seconds."""
    request = aggregation.request
    made = _seal_model(aggregation, outputs.model, aggregation.sent) if aggregation.sent else None
    seconds = {name: round(value, 4) for name, value in aggregation.seconds.items()}
    record = dataclasses.replace(record, seconds=seconds)
    if outputs.state is not None:
        write_record(outputs.state / ROUND, record)
        seal(
            outputs.state,
            federation=record.federation,
            round=record.round + 1,
            outer=aggregation.settings.server_optimizer,
            parameters=aggregation.source.parameters,
            model=made,
            model_path=Path(request.out),
            known=aggregation.written[outputs.state],
        )
    if request.record or request.state_out is None:
        beside = Path(request.out).with_name(Path(request.out).name + f".{ROUND}")
        write_record(Path(request.record) if request.record else beside, record)
    return record


def _work(aggregation: Aggregation, outputs: Outputs, stack: ExitStack, model: TensorWriter) -> Work:
    """The pass that combines the updates, moves the master and writes both."""
    settings, floats, unmasking = aggregation.settings, aggregation.floats, aggregation.request.unmasking
    optimizer = SERVER_OPTIMIZERS.get(settings.server_optimizer)
    step, starts = build(settings.server_optimizer, aggregation.number, settings.values_of(optimizer))
    aggregation.sources = sources = Sources()
    if aggregation.request.verify_base and aggregation.sent is not None:
        known = known_files(aggregation.linked, aggregation.sent, read_unchanged(aggregation.request.state_in))
        unknown = [name for name in tensor_files(aggregation.sent) if name not in known]
        sources.promise(Path(aggregation.request.base), aggregation.sent, unknown)
    before = SERVER_OPTIMIZERS.built_in.get(kept_by(aggregation.request.state_in))
    kept = [MASTER, *optimizer.goes_on_from(before)]
    old = open_state(aggregation.request.state_in, aggregation.sent, kept, sources)
    if aggregation.request.verify_updates:
        sources.promise_updates(aggregation.opened, aggregation.verified)
    writers = _state_writers(aggregation, outputs.state, stack, [MASTER, *optimizer.slots])
    statistics = "off" if aggregation.measured and settings.statistics != "exact" else settings.statistics
    added = step is plain.add and aggregation.plan.coefficients is not None  # else only the pass knows the step's norm
    return Work(
        base=floats,
        updates=[update.entries for update in aggregation.opened],
        coefficients=aggregation.plan.coefficients_of if unmasking is None else None,
        unmasking=unmasking,
        combine=aggregation.plan.combine,
        master=fitting(old.get(MASTER), floats),
        slots=[fitting(old.get(name), floats) for name in optimizer.slots],
        slot_starts=starts,
        step=None if added else with_kept_arguments(settings.server_optimizer, step),
        momentum=needs_momentum(settings),
        float64=settings.accumulate == "float64",
        statistics=statistics,
        products=aggregation.measured is None,
        hashed=sources.hashed,
        model=model,
        new_master=writers[0] if writers else None,
        new_slots=writers[1:],
    )


def _write_products(aggregation: Aggregation, model: TensorWriter, work: Work, errors: FactorErrors) -> float:
    """The mean of the products, of updates that are clipped as the plan says, times the server learning rate; returns
    the squared norm of the change."""
    coefficients, weights = aggregation.plan.coefficients, aggregation.weights
    assert coefficients is not None
    clipping = [one / weight for one, weight in zip(coefficients, weights, strict=True)]
    rate = float(aggregation.settings.values_of(SERVER_OPTIMIZERS.get("plain"))["server_learning_rate"])
    return write_products(
        aggregation.opened,
        weights,
        clipping,
        base=work.base,
        kept=work.master,
        model=model,
        master=work.new_master,
        errors=errors,
        rate=rate,
    )


def _factor_errors(aggregation: Aggregation) -> FactorErrors | None:
    """What finds the errors of adapters' means, as the updates are read; None where there are no adapters to see."""
    if not aggregation.with_adapters or aggregation.request.unmasking is not None:
        return None
    agreed = aggregation.request.adapters
    entries = [update.entries for update in aggregation.opened]
    return FactorErrors(entries, aggregation.weights, agreed.parameters if agreed is not None else ())


def _state_writers(
    aggregation: Aggregation, state: Path | None, stack: ExitStack, names: Sequence[str]
) -> list[TensorWriter]:
    """A writer for the master and each slot, in float32 or the master's float64; none without a state."""
    if state is None:
        return []
    kinds = {name: "F64" if entry.dtype == "F64" else "F32" for name, entry in aggregation.floats.items()}
    writers = []
    for name in names:
        (state / name).mkdir()
        layout = layout_like(aggregation.source, kinds)
        writers.append(
            stack.enter_context(TensorWriter(state / name, layout, {"format": "pt"}, hashed=True, digest=Checksum))
        )
    return writers


def _seal_model(aggregation: Aggregation, directory: Path, sent: Manifest) -> Manifest:
    made = open_checkpoint(directory)
    return write_manifest(
        directory,
        Manifest(
            kind="model",
            federation=sent.federation,
            round=sent.round + 1,
            dtypes=made.dtypes(),
            parameters=made.parameters,
            extra={"rule": aggregation.request.settings.rule},
        ),
        aggregation.written[directory],
    )


def _copy_others(aggregation: Aggregation, model: TensorWriter, linked: Collection[str]) -> None:
    """Copy the tensors that are not federated, but the `linked` ones, and verify files that hold no others thereby.

    Among them are those of adapters that begin in this round.
    """
    tensors, floats = aggregation.source.tensors | aggregation.whole.tensors, aggregation.floats
    read = {tensors[name].file for name in floats if name in tensors}
    unread = [entry for entry in tensors.values() if entry.file not in read]
    promised = aggregation.sources.hashed
    hashed = {e.file: promised[e.file] for e in unread if e.file in promised and e.name not in linked}
    expect_tensors(hashed, unread)
    for entry in sorted(tensors.values(), key=lambda entry: (entry.file, entry.start)):
        if entry.name not in floats and entry.name not in linked:
            _copy_tensor(entry, model, aggregation.dtypes.get(entry.name, entry.dtype), hashed.get(entry.file))


def _copy_tensor(entry: TensorEntry, writer: TensorWriter, dtype: str, hashed: StreamedDigest | None) -> None:
    """Take a tensor that is not federated from the base, streaming; `hashed`: of its file, takes what is read."""
    name = entry.name
    if dtype != entry.dtype:
        same = {name: entry}
        work = Work(base=same, updates=[same], coefficients=lambda _: [1.0], statistics="off", model=writer)
        kernel.run(work, threads=1)
        return
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, COPY_BYTES):
            file.seek(entry.start + offset)
            content = memoryview(file.read(min(COPY_BYTES, entry.size - offset)))
            writer.write(name, offset, content)
            if hashed is not None:
                hashed.feed(entry.start + offset, content)
