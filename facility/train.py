"""Train one local round: a global model in, an update out.

    python -m facility.train --model DIR --dataset DIR --settings FILE --round N --out DIR

Run by one process, or by several whose environment says who they are (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT): `python -m facility.launch` and torchrun both set it. Exit codes: 0 the update is complete; 85 time ran
out, the same command goes on; 2 the input must be changed; 75 a passing fault; 1 our mistake.

Round N = rounds, one past the last, asks for the evaluation of the final model: no step is taken, no state is touched,
and the update holds `report.json` and `manifest.json` alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import resource
import shutil
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from facility.dataset import PreparedDataset, open_dataset
from facility.exchange import manifest as manifests
from facility.exchange import report as reports
from facility.exchange.checkpoint import FLOATS, Checkpoint, open_checkpoint
from facility.exchange.durable import new_directory
from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.outcome import Outcome
from facility.exchange.settings import FacilitySettings, read_facility_settings
from facility.training import state as states
from facility.training.engine import Engine
from facility.training.feed import Feed
from facility.training.layout.grid import Grid, grid
from facility.training.layout.shard import shard
from facility.training.load import Part, load_parts, materialise, part_of
from facility.training.model import build, choose_attention, names_on_disk, read_config, same_tensors
from facility.training.progress import Progress
from facility.training.ranks import Ranks, barrier, broadcast, end, from_environment, start, together
from facility.training.save import create_files, plan_files, rounded, write_parts
from facility.training.schedule import learning_rate
from facility.training.seeds import derive
from facility.training.tasks import task_named


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m facility.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR", help="the received Hugging Face checkpoint")
    p.add_argument("--dataset", type=Path, required=True, metavar="DIR", help="what `python -m facility.prepare` wrote")
    p.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    p.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the update; must not exist, appears whole")
    p.add_argument("--state", type=Path, metavar="DIR", help="what is kept between rounds; default: "
                   "$CROSSFED_STATE/<federation>/<facility>, or .crossfed/<federation>/<facility> beside the dataset")  # fmt: skip
    p.add_argument("--progress", action="store_true", help="a line per step on stderr even when it is no terminal")
    return p


def main(argv: list[str] | None = None) -> int:
    a = parser().parse_args(argv)
    settings = read_facility_settings(a.settings)
    training = settings.training
    ranks = from_environment(training.device)
    start(ranks, threads=training.threads, timeout_seconds=training.stall_seconds)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(derive(settings.seed, "round", a.round, settings.facility))
    clock = time.perf_counter

    began = clock()
    with together(ranks):
        checkpoint, base = read_model(a.model, a.round, ranks, evaluation=a.round == settings.rounds)
        dataset = open_dataset(a.dataset)
        config = read_config(a.model)
        check_inputs(a.round, a.out, settings, dataset, config)
    state_directory = a.state or states.default_directory(settings, a.dataset)
    task = task_named("causal_lm")
    attention = choose_attention(ranks.device, getattr(torch, training.compute_dtype))
    with together(ranks):
        arrangement = grid(ranks.world)
        feed = Feed(dataset, task, training, seed=settings.seed, facility=settings.facility,
                    reader=arrangement.reader(ranks.rank), readers=arrangement.readers)  # fmt: skip
        previous, reason = states.read_state(state_directory, settings, a.round)
    progress = Progress(ranks, settings, a.round, always=a.progress)
    progress.say(f"{ranks.world} rank(s) on {device_name(ranks)}; attention {attention.name}: {attention.reason}")
    progress.say(reason)

    model = build(config, task.factory, attention)
    names = names_on_disk(model, checkpoint)
    shapes = {names[n]: tuple(p.shape) for n, p in model.named_parameters() if n in names}
    apply_layout(model, arrangement, ranks, training.compute_dtype)
    materialise(model, ranks.device)
    parts = [part_of(names[name], parameter) for name, parameter in model.named_parameters()]
    with together(ranks):
        load_parts(parts, checkpoint)
    engine = Engine(model, parts, task, arrangement, ranks, training)
    optimizer_steps = 0
    if previous is not None and previous.optimizer_steps and training.keep_optimizer:
        with together(ranks):
            states.load_moments(
                state_directory / f"round-{a.round - 1}", engine.optimizer, parts, previous.optimizer_steps
            )
        optimizer_steps = previous.optimizer_steps
    position = previous.position if previous else a.round * training.steps * training.batch_sequences
    loaded = clock()

    loss_received = engine.evaluate(feed.evaluation())
    progress.say(f"received: loss {loss_received:.4f}, perplexity {perplexity(loss_received):.2f}")
    evaluated = clock()
    if a.round == settings.rounds:
        write_evaluation(a.out, settings, base, ranks, loss_received, loaded - began, evaluated - loaded)
        return Outcome.DONE

    losses = []
    for step in range(training.steps):
        overall = a.round * training.steps + step
        torch.manual_seed(derive(settings.seed, "step", a.round, settings.facility, step, ranks.rank))
        rate = learning_rate(overall, settings.rounds * training.steps, training)
        result = engine.step(feed.step(position), rate)
        losses.append(result.loss)
        position += training.batch_sequences
        progress.step(step, result, rate)
    trained = clock()

    with together(ranks):
        export_round(parts, training.export_dtype)  # the model as it travels is the one evaluated
    loss_returned = engine.evaluate(feed.evaluation())
    progress.say(f"returned: loss {loss_returned:.4f}, perplexity {perplexity(loss_returned):.2f}")
    evaluated_again = clock()

    new_state = states.RoundState(
        federation=settings.federation, facility=settings.facility, seed=settings.seed, round=a.round, position=position,
        optimizer_steps=optimizer_steps + training.steps if training.keep_optimizer else 0,
    )  # fmt: skip
    kept = engine.optimizer if training.keep_optimizer else None
    states.save_state(state_directory, new_state, ranks, list(shapes.items()), kept, parts)
    sequences = training.steps * training.batch_sequences
    tokens = sequences * dataset.manifest.block_tokens
    peak = peak_memory_bytes(ranks)

    def report(saved: float) -> reports.Report:
        return reports.Report(
            federation=settings.federation, facility=settings.facility, round=a.round, samples=sequences, tokens=tokens,
            steps=training.steps, loss_received=loss_received, loss_returned=loss_returned,
            perplexity_received=perplexity(loss_received), perplexity_returned=perplexity(loss_returned),
            training_loss=sum(losses) / len(losses), tokens_per_second=tokens / (trained - evaluated),
            seconds=reports.Seconds(load=loaded - began, train=trained - evaluated, save=saved - evaluated_again,
                                    evaluate=evaluated - loaded + evaluated_again - trained),
            peak_memory_bytes=peak, seed=settings.seed, position=position, ranks=ranks.world,
            devices=[device_name(ranks)], versions=versions(),
        )  # fmt: skip

    outgoing = exported_parts(parts, checkpoint, same_tensors(model, checkpoint, names), ranks)
    write_update(a.out, a.model, checkpoint, base, outgoing, ranks, settings, a.round, report)
    progress.say(f"update written to {a.out}")
    return Outcome.DONE


def read_model(
    directory: Path, round: int, ranks: Ranks, *, evaluation: bool
) -> tuple[Checkpoint, manifests.Manifest | None]:
    """Open the received model; where it carries a manifest, the first rank checks every byte against it.

    A federation that ended early has its final model, of an earlier round, evaluated.
    """
    base = None
    if (directory / manifests.NAME).is_file():
        base = manifests.verify_manifest(directory) if ranks.first else manifests.read_manifest(directory)
        if base.kind != "model":
            raise ManifestError(f"{directory} is an {base.kind}, expected a model")
        if base.round != round and not evaluation:
            raise ManifestError(f"{directory} is the model of round {base.round}, expected round {round}")
    return open_checkpoint(directory), base


def check_inputs(round: int, out: Path, settings: FacilitySettings, dataset: PreparedDataset, config: object) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not 0 <= round <= settings.rounds:
        raise ConfigurationError(
            f"--round is {round}, the federation has rounds 0 to {settings.rounds - 1} (and {settings.rounds} to evaluate)"
        )
    if out.exists():
        raise ConfigurationError(f"--out {out} exists already; remove it or choose another name")
    vocabulary = getattr(config, "vocab_size", None) or getattr(
        getattr(config, "text_config", None), "vocab_size", None
    )
    if vocabulary is not None and dataset.manifest.vocabulary_size > vocabulary:
        raise InputError(
            f"{dataset.directory} was tokenised with a vocabulary of {dataset.manifest.vocabulary_size}, the model has "
            f"{vocabulary} entries: prepare the dataset with the model's own tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if longest is not None and dataset.manifest.block_tokens > longest:
        raise InputError(
            f"{dataset.directory} has blocks of {dataset.manifest.block_tokens} tokens, the model takes at most "
            f"{longest} positions: prepare shorter blocks"
        )


def apply_layout(model: torch.nn.Module, arrangement: Grid, ranks: Ranks, compute_dtype: str) -> None:
    """Shard the model as the grid says; one rank alone needs nothing."""
    if arrangement.shards > 1:
        mesh = DeviceMesh(ranks.device.type, torch.from_numpy(arrangement.ranks[0, 0]), mesh_dim_names=("shard",))
        shard(model, mesh, compute_dtype=getattr(torch, compute_dtype), reshard=True)


@torch.no_grad()
def export_round(parts: list[Part], dtype: str) -> None:
    """Round the trained weights to the dtype they travel in, in place."""
    for part in parts:
        part.tensor.copy_(rounded(part.name, part.tensor, getattr(torch, dtype)))


def exported_parts(parts: list[Part], checkpoint: Checkpoint, repeats: dict[str, str], ranks: Ranks) -> list[Part]:
    """Everything the update holds: trained parts, tied ones again under their other name, the rest as received."""
    by_name = {part.name: part for part in parts}
    outgoing = parts + [dataclasses.replace(by_name[source], name=name) for name, source in repeats.items()]
    if ranks.first:
        for name in sorted(set(checkpoint.tensors) - {part.name for part in outgoing}):
            outgoing.append(part_of(name, torch.nn.Parameter(checkpoint.read(name), requires_grad=False)))
    return outgoing


def write_update(
    out: Path, model: Path, checkpoint: Checkpoint, base: manifests.Manifest | None, parts: list[Part], ranks: Ranks,
    settings: FacilitySettings, round: int, report: object,
) -> None:  # fmt: skip
    """Write the update directory whole: the received checkpoint's tensors by the same names, trained."""
    dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[settings.training.export_dtype]
    layout = [(n, dtype if e.dtype in FLOATS else e.dtype, e.shape) for n, e in checkpoint.tensors.items()]
    slots, headers = plan_files(layout)
    if not ranks.first:
        temporary = Path(broadcast(ranks, None))
        barrier(ranks)
        with together(ranks):
            write_parts(temporary, slots, parts)
        barrier(ranks)
        return
    with new_directory(out) as temporary:
        broadcast(ranks, str(temporary))
        create_files(temporary, slots, headers)
        barrier(ranks)
        with together(ranks):
            write_parts(temporary, slots, parts)
        copy_companions(model, temporary, settings.training.export_dtype)
        reports.write(temporary, report(time.perf_counter()))  # type: ignore[operator]
        counts = {d: sum(1 for _, x, _ in layout if x == d) for d in sorted({x for _, x, _ in layout})}
        manifests.write_manifest(temporary, manifests.Manifest(
            kind="update", federation=settings.federation, round=round, facility=settings.facility,
            base_sha256=base.content_sha256 if base else None, dtypes=counts, parameters=checkpoint.parameters,
        ))  # fmt: skip
    barrier(ranks)


def write_evaluation(
    out: Path, settings: FacilitySettings, base: manifests.Manifest | None, ranks: Ranks, loss: float, load: float,
    evaluate: float,
) -> None:  # fmt: skip
    """Leave the final model's loss here as an update without weights."""
    peak = peak_memory_bytes(ranks)
    if ranks.first:
        with new_directory(out) as temporary:
            reports.write(temporary, reports.Report(
                federation=settings.federation, facility=settings.facility, round=settings.rounds, samples=0, tokens=0,
                steps=0, loss_received=loss, loss_returned=loss, perplexity_received=perplexity(loss),
                perplexity_returned=perplexity(loss), training_loss=loss, peak_memory_bytes=peak, ranks=ranks.world,
                seconds=reports.Seconds(load=load, evaluate=evaluate), devices=[device_name(ranks)], versions=versions(),
            ))  # fmt: skip
            manifests.write_manifest(temporary, manifests.Manifest(
                kind="update", federation=settings.federation, round=settings.rounds, facility=settings.facility,
                base_sha256=base.content_sha256 if base else None,
            ))  # fmt: skip
    barrier(ranks)


def copy_companions(model: Path, target: Path, dtype: str) -> None:
    """The configuration, its dtype that of the export, and the small files beside it (tokenizer)."""
    import json

    for path in sorted(model.iterdir()):
        name = path.name
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not name.endswith("index.json"):
            if name not in (manifests.NAME, reports.REPORT, "config.json"):
                shutil.copyfile(path, target / name)
    config = json.loads((model / "config.json").read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def peak_memory_bytes(ranks: Ranks) -> int:
    """Largest over the ranks: resident memory of the process, or what was allocated on its GPU."""
    if ranks.device.type == "cuda":
        mine = torch.cuda.max_memory_allocated(ranks.device)
    else:
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if ranks.world == 1:
        return mine
    total = torch.tensor(mine, dtype=torch.int64, device=ranks.device)
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.MAX)
    return int(total)


def device_name(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    import transformers

    import facility

    return {"crossfed": facility.__version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__}  # fmt: skip


if __name__ == "__main__":
    end(main)
