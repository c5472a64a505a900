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
import time
from pathlib import Path

import torch

from facility.dataset import open_dataset
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages import report as reports
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.plan import read_plan
from facility.exchange.messages.settings import read_facility_settings
from facility.rounds.kept import default_directory
from facility.training import lora, memory
from facility.training.data.inputs import check_inputs, check_vocabulary, read_model
from facility.training.data.loader import DataLoader
from facility.training.data.tasks import task_for
from facility.training.engine import Engine
from facility.training.head import choose_head
from facility.training.model import choose_attention, count_blocks, read_config
from facility.training.monitor import account
from facility.training.monitor.clock import Clock
from facility.training.monitor.progress import Progress
from facility.training.monitor.trace import Trace
from facility.training.monitor.tracker import Tracker
from facility.training.parallel import arrange
from facility.training.parallel.assemble import assemble, build_meta_model
from facility.training.parallel.ranks import end, from_environment, gather, start, together
from facility.training.parallel.replicas import order_of, paces, synchroniser
from facility.training.parallel.split import inspect_model
from facility.training.schedule import learning_rate
from facility.training.seeds import derive
from facility.training.state import state
from facility.training.state.load import add_shards, load_shards
from facility.training.state.update import (
    outgoing_parts,
    outgoing_tensors,
    round_in_place,
    write_evaluation,
    write_update,
)
from facility.training.stop import Stop


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m facility.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR", help="the received Hugging Face checkpoint")
    p.add_argument("--dataset", type=Path, required=True, metavar="DIR", help="what `python -m facility.prepare` wrote")
    p.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    p.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the update; must not exist, appears whole")
    p.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="what is kept between rounds; default: "
        "$CROSSFED_STATE/<federation>/<facility>, or .crossfed/<federation>/<facility> beside the dataset",
    )
    p.add_argument(
        "--unsent",
        type=Path,
        metavar="DIR",
        help="what earlier updates of this facility left out: added to the received weights before the first step",
    )
    p.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a plan.json that lays the model over the ranks; default: training.layout.plan of the settings, if any",
    )
    p.add_argument("--progress", action="store_true", help="a line for every step on stderr, not one a second at most")
    return p


def main(argv: list[str] | None = None) -> int:
    a = parser().parse_args(argv)
    began = time.perf_counter()
    settings = read_facility_settings(a.settings)
    training = settings.training
    stop = Stop(training.limits, began)
    ranks = from_environment(training.device)
    plan_file = a.plan or (Path(training.layout.plan) if training.layout.plan else None)
    plan = read_plan(plan_file) if plan_file else None
    number = ranks.rank
    if plan is not None:
        place = arrange.remapped_rank(ranks, plan, training.layout.shards or 1)
        if place is None:
            print(f"rank {ranks.rank}: the plan leaves this rank idle", flush=True)
            return Outcome.DONE
        ranks = place
    start(ranks, threads=training.threads, timeout_seconds=training.stall_seconds)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(derive(settings.seed, "round", a.round, settings.facility))
    progress = Progress(ranks, settings, a.round, always=a.progress)

    with together(ranks):
        if plan is not None and (training.layout.shards or 1) == 1:
            arrange.check_devices(plan, number, ranks)
        checkpoint, base = read_model(a.model, a.round, ranks, evaluation=a.round == settings.rounds)
        received, base_model = checkpoint, Path(training.lora.base) if training.lora.base else a.model
        if base_model != a.model:
            checkpoint = open_checkpoint(base_model)
        dataset = open_dataset(a.dataset)
        config = read_config(base_model)
        check_inputs(a.round, a.out, settings, dataset, config)
        if ranks.first:
            check_vocabulary(base_model, dataset)
        task = task_for(dataset, config)
        attention = choose_attention(config, task.factory, ranks.device, getattr(torch, training.compute_dtype))
        tokens = dataset.manifest.block_tokens
        blocks = count_blocks(config, task.factory, attention)
        if plan is not None:
            layout = arrange.layout_of_plan(plan, ranks, training, blocks=blocks, block_tokens=tokens)
        else:
            layout = arrange.layout_of_settings(ranks, training, blocks=blocks, block_tokens=tokens)
        head = choose_head(
            training,
            config,
            task.factory,
            attention.name,
            sequences=layout.shape.micro_batch_sequences,
            tokens=tokens,
            device=ranks.device.type,
        )
        structure = inspect_model(config, task.factory, attention.name, tokens) if layout.units else None
        data_rank = layout.grid.data_rank(ranks.rank)
        loader = DataLoader(
            dataset,
            task,
            layout.shape,
            seed=settings.seed,
            facility=settings.facility,
            data_rank=data_rank,
            data_ranks=layout.grid.data_ranks,
            evaluation_sequences=training.evaluation_sequences,
            apart=order_of(layout, ranks, sequences=len(dataset.split("train")), seed=settings.seed),
        )
        directory = a.state or default_directory(settings, a.dataset)
        previous, reason = state.read_state(directory, settings, a.round)
        pause = state.read_checkpoint(directory, settings, a.round, base.content_sha256 if base else "")
    progress.say(
        f"{ranks.world} rank(s) on {account.device_name(ranks.device)}; attention {attention.name}: {attention.reason}"
    )
    for line in (*layout.reasons, head.reason, reason):
        progress.say(line)

    clock = Clock(ranks.device)
    with together(ranks):
        skeleton = build_meta_model(config, task, attention, training)
        memory.check(
            memory.predicted_bytes(skeleton, structure, layout, ranks, training, config, head.rows), ranks, training
        )
    held = assemble(skeleton, task, checkpoint, layout, ranks, training, clock, structure, head.rows)
    with together(ranks):
        weights = [part for part in held.parts if not lora.is_adapter(part.name)]
        load_shards([*weights, *held.buffers], checkpoint, held.names.conversion)
        if training.lora.rank:
            progress.say(lora.load_adapters(held.parts, received, settings.seed))
    engine = Engine(held, layout, ranks, training, clock)
    replicas, pace = paces(layout, ranks, engine)
    optimizer_steps = 0
    if pause is None and previous is not None and previous.optimizer_steps and training.keep_optimizer:
        with together(ranks):
            before = directory / f"round-{a.round - 1}"
            state.load_moments(before, engine.optimizer, engine.parts, previous.optimizer_steps)
        optimizer_steps = previous.optimizer_steps
    batch = layout.shape.batch_sequences
    position = previous.position if previous else a.round * training.steps * batch
    loaded = time.perf_counter()

    if pause is None:
        loss_received = engine.evaluate(loader.evaluation())
        if a.unsent is not None:
            with together(ranks):
                add_shards(engine.parts, open_checkpoint(a.unsent), held.names.conversion)
        done, losses, interruptions, trained_before, samples = 0, [], 0, 0.0, 0.0
    else:
        with together(ranks):
            state.load_checkpoint(directory, pause, engine.optimizer, engine.parts, replica=pace, replicas=replicas)
        here = pause.standing(pace, replicas)
        done, losses, position, samples = here.steps, here.losses, here.position, here.samples
        optimizer_steps, engine.scale, engine.skipped = here.optimizer_steps, here.scale, here.skipped
        loss_received, interruptions, trained_before = pause.loss_received, pause.interruptions + 1, pause.seconds
        progress.say(f"going on after step {done} of {training.steps}")
    progress.say(f"received: loss {loss_received:.4f}, perplexity {account.perplexity(loss_received):.2f}")
    evaluated = time.perf_counter()
    if a.round == settings.rounds:
        write_evaluation(a.out, settings, base, ranks, loss_received, loaded - began, evaluated - loaded)
        return Outcome.DONE

    sync = synchroniser(
        layout,
        ranks,
        engine,
        steps=training.steps,
        done=done,
        samples=samples,
        round=a.round,
        log=directory / (f"sync-{a.round}.{interruptions}" if interruptions else f"sync-{a.round}"),
    )
    vectors = sync.state_dict()
    with together(ranks):
        if pause is not None:
            which = pace if len(pause.replicas) == replicas else 0
            state.load_vectors(directory / state.PAUSED, pause.sync, vectors, engine.parts, replica=which)
        elif optimizer_steps and previous is not None and previous.sync:
            state.load_vectors(directory / f"round-{a.round - 1}", previous.sync, vectors, engine.parts)
    sync.load_state_dict(vectors)
    writes = layout.grid.place(ranks.rank)[0] == 0

    def save_checkpoint() -> None:
        mine = state.ReplicaProgress(
            steps=done,
            position=position,
            optimizer_steps=optimizer_steps,
            losses=losses,
            scale=engine.scale,
            skipped=engine.skipped,
            samples=sync.samples,
        )
        told = gather(ranks, [pace, dataclasses.asdict(mine)])
        every = {place: state.ReplicaProgress(**found) for place, found in told[::-1]}
        state.save_checkpoint(
            directory,
            state.MidRoundCheckpoint(
                federation=settings.federation,
                facility=settings.facility,
                seed=settings.seed,
                round=a.round,
                base_sha256=base.content_sha256 if base else "",
                loss_received=loss_received,
                seconds=trained_before + time.perf_counter() - evaluated,
                interruptions=interruptions,
                replicas=[every[number] for number in range(replicas)],
                sync=sorted(sync.state_dict()),
            ),
            ranks,
            held.shapes,
            engine.optimizer,
            engine.parts,
            vectors=sync.state_dict(),
            replica=pace,
            writes=writes or not engine.together,
        )

    tracker = Tracker(training.tracker, directory, f"{settings.federation}-{settings.facility}-{a.round}", ranks)
    if tracker.reason:
        progress.say(tracker.reason)
    ends: list[float] = []

    def overall_now() -> int:
        return a.round * training.steps + int(sync.progress)

    def rate_now() -> float:
        return sync.influence * learning_rate(overall_now(), settings.rounds * training.steps, training)

    trace = Trace(training.trace, directory, a.round, ranks)
    while sync.wants_more():
        wanted = stop.wanted(done)
        if engine.agree_to_stop(wanted) if engine.together else wanted:
            sync.ask_to_pause()
        if sync.pausing:
            break
        torch.manual_seed(derive(settings.seed, "step", a.round, settings.facility, done, ranks.rank))
        with clock("data"):
            batches = loader.step(position)
        overall = overall_now()
        result = engine.step(batches, rate_now, None if engine.together else sync)
        sync.after_step(result.predictions)
        losses.append(-1.0 if result.skipped else result.loss)
        done, position, optimizer_steps = done + 1, position + batch, optimizer_steps + (not result.skipped)
        progress.step(done, result)
        ends.append(time.perf_counter())
        tracker.log(overall, loss=result.loss, gradient_norm=result.gradient_norm, learning_rate=result.rate)
        trace.step()
        if training.limits.save_every and done % training.limits.save_every == 0 and engine.together:
            save_checkpoint()
    if not sync.finish():
        save_checkpoint()
        sync.close()
        progress.say(
            f"stopped after step {done} of {training.steps} ({stop.reason or 'asked by another rank'}); "
            "the same command goes on from here"
        )
        return Outcome.CHECKPOINTED
    if not engine.together:  # replicas went at speeds of their own: the next round begins where all are past
        position += (training.steps - done) * batch
    sync_report, kept_vectors = sync.report(), sync.state_dict()
    for thing in (sync, tracker, trace):
        thing.close()
    trained = time.perf_counter()

    with together(ranks):
        round_in_place(engine.parts, training.export_dtype)
    loss_returned = engine.evaluate(loader.evaluation())
    progress.say(f"returned: loss {loss_returned:.4f}, perplexity {account.perplexity(loss_returned):.2f}")
    evaluated_again = time.perf_counter()

    kept = engine.optimizer if training.keep_optimizer else None
    state.save_state(
        directory,
        state.RoundState(
            federation=settings.federation,
            facility=settings.facility,
            seed=settings.seed,
            round=a.round,
            position=position,
            optimizer_steps=optimizer_steps if training.keep_optimizer else 0,
            sync=sorted(kept_vectors) if training.keep_optimizer else [],
        ),
        ranks,
        held.shapes,
        kept,
        engine.parts,
        vectors=kept_vectors,
        writes=writes,
    )

    good = [loss for loss in losses if loss >= 0]
    if not good:
        raise ConfigurationError("every step of the round was skipped: no loss was finite")
    seconds = trained_before + trained - evaluated
    mine = layout.shape.bounds[data_rank + 1] - layout.shape.bounds[data_rank] if engine.counts else 0
    sequences = sum(gather(ranks, done * mine))
    per_rank = gather(
        ranks,
        {
            "rank": ranks.rank,
            "device": account.device_name(ranks.device),
            "peak_memory_bytes": account.peak_memory_bytes(ranks),
            "seconds": {k: round(v, 4) for k, v in clock.seconds.items()},
        },
    )
    details = account.details(held, layout, config, seconds, sequences * tokens, per_rank, training.peak_flops) | {
        "tokens_per_second_steady": account.steady(ends, batch * tokens),
        "sync": sync_report,
        "steps_skipped": engine.skipped,
        "interruptions": interruptions,
        "attention": {"name": attention.name, "reason": attention.reason},
        "loss": head.reason,
    }

    def report() -> reports.Report:
        return reports.Report(
            federation=settings.federation,
            facility=settings.facility,
            round=a.round,
            samples=sequences,
            tokens=sequences * tokens,
            steps=done,
            loss_received=loss_received,
            loss_returned=loss_returned,
            perplexity_received=account.perplexity(loss_received),
            perplexity_returned=account.perplexity(loss_returned),
            training_loss=sum(good) / len(good),
            tokens_per_second=sequences * tokens / seconds,
            seconds=reports.Seconds(
                load=loaded - began,
                train=seconds,
                save=time.perf_counter() - evaluated_again,
                evaluate=evaluated - loaded + evaluated_again - trained,
            ),
            peak_memory_bytes=max(r["peak_memory_bytes"] for r in per_rank),
            seed=settings.seed,
            position=position,
            ranks=ranks.world,
            devices=sorted({r["device"] for r in per_rank}),
            versions=account.versions(),
            details=details,
        )

    outgoing = outgoing_parts(held.parts, held.names.repeats)
    tensors = outgoing_tensors(checkpoint, held.shapes if training.lora.rank else None, training.export_dtype)
    write_update(
        a.out,
        a.model,
        checkpoint,
        tensors,
        held.names,
        base,
        outgoing,
        ranks,
        writes,
        settings,
        a.round,
        report,
    )
    progress.say(f"update written to {a.out}")
    return Outcome.DONE


if __name__ == "__main__":
    end(main)
