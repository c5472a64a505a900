"""Does the model that the jobs build fit the initial checkpoint, and each facility's adapters and layout that model?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from coordinator.config.deployments import job_template
from coordinator.config.federation import Facility, Federation
from coordinator.memory.layouts import layouts_of_settings
from coordinator.preflight.patterns import check_patterns
from coordinator.preflight.row import ME, Row, fail, ok, skipped, warning
from coordinator.preflight.scheduler import wanted_nodes
from facility.exchange.checkpoints.adapter_targets import parameters_of, targets_of
from facility.exchange.checkpoints.adapters import HEADS, PREFIX, A, B, is_saved_module
from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.checkpoints.conversion import check_names
from facility.exchange.checkpoints.families import refusal_for
from facility.exchange.checkpoints.layouts import (
    refusal_of_adapters,
    refusal_of_batch_norms,
    refusal_of_quantized,
    refusal_of_router_loss,
    refusal_of_shards,
    refusal_of_stages,
)
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.saved_modules import refusal_of_saved
from facility.exchange.checkpoints.separate_documents import refusal_of_positions
from facility.exchange.checkpoints.task_class import (
    FACTORIES,
    OWN_ATTENTION,
    built_for_some_task,
    config_in,
    model_of,
    named_class,
    task_of_classes,
)
from facility.exchange.errors import CrossFedError
from facility.exchange.json_values import values_in
from facility.exchange.memory.chunks import WHOLE_LOGITS, obstacle_to_chunks
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.preference import PreferenceSettings
from facility.exchange.task_words import Task


def check_fitting(
    federation: Federation, answered: Mapping[str, Any] | None = None, shared: Mapping[str, int] | None = None
) -> list[Row]:
    """Rows on tensor names, patterns of them, and targets and modules of adapters; imports transformers.

    A job builds the class of the task that its dataset was prepared for. `answered`: that task, by facility, as each
    answered. Where it did not and the dataset is elsewhere, or the trainer is its own, the class is config.json's.
    `shared`: so too, the tokens of blocks that documents share without seeing each other.
    """
    tasks = {
        one.name: task_in((answered or {}).get(one.name)) or task_here(federation, one) for one in federation.facilities
    }
    path, rows = federation.path(federation.model), check_patterns(federation)
    for task in dict.fromkeys(tasks.values()):
        names, model = _names(path, task)
        rows.append(names)
        if model is None:
            continue
        of_task = [one for one in federation.facilities if tasks[one.name] == task]
        built_in = [one for one in of_task if federation.trainer_of(one).built_in]
        private = federation.privacy is not None and federation.privacy.differential is not None
        if not private and task not in WHOLE_LOGITS:
            rows += _chunked_loss(path, task, [one for one in built_in if one.training.chunked_loss == "always"])
        for one in built_in:
            rows += _layout(federation, one, model, private=private)
            if tokens := (shared or {}).get(one.name) or shared_here(federation, one):
                rows += _separate(one, model, task, 0 if private else tokens)
        for one in of_task:
            if one.training.lora.rank:
                rows += _adapters(one.name, one.training.lora, model, federation.aggregation.federated)
    return rows + [row for one in federation.facilities for row in _without_effect(one, tasks[one.name])]


def _chunked_loss(path: Path, task: Task | None, always: Sequence[Facility]) -> list[Row]:
    """Facilities that demand chunks of a model whose loss is not its output layer's alone: their jobs would refuse."""
    if not always:
        return []
    import transformers

    config = config_in(path)
    factory = getattr(transformers, FACTORIES[task or task_of_classes(config.architectures)])
    obstacle = obstacle_to_chunks(config, factory, OWN_ATTENTION)
    found = f"training.chunked_loss is 'always', but {obstacle}"
    return [fail(one.name, "chunked loss", found, "use 'auto' or 'never'") for one in always if obstacle]


def _without_effect(facility: Facility, task: Task | None) -> list[Row]:
    """A warning where `training.preference` is set and the dataset holds no preferences."""
    if task in (None, "preference") or facility.training.preference == PreferenceSettings():
        return []
    found = f"training.preference has no effect: the dataset was prepared for {task}"
    return [warning(facility.name, "preference", found, "prepare it with --task preference, or leave the setting out")]


def _layout(federation: Federation, facility: Facility, model: Any, *, private: bool) -> list[Row]:
    """A row where the facility's job would refuse the model in its layout, with adapters or with noise, in its words.

    A layout of a plan lies at the facility: how many stages it has is not known here."""
    training = facility.training
    layout, lora = training.layout, training.lora
    pipeline, recomputes = layout.stages > 1 and not layout.plan, layout.activation_checkpointing != "none"
    reason = (
        refusal_of_router_loss(model.config, pipeline=pipeline, private=private)
        or refusal_of_batch_norms(model, adapters=bool(lora.rank), recomputes=recomputes)
        or (refusal_of_stages(model) if pipeline else "")
        or _refusal_of_shards(federation, facility, model)
        or refusal_of_adapters(model, lora)
        or refusal_of_quantized(model, lora)
    )
    advice = "every job of it would end so: correct its `training:` in federation.yml, or the initial model"
    return [fail(facility.name, "layout", reason, advice)] if reason else []


def _refusal_of_shards(federation: Federation, facility: Facility, model: Any) -> str:
    """Why the facility's ranks cannot share each block, where they would as far as is known here; else empty.

    Ranks that cannot be arranged so are the subject of another check."""
    reason = refusal_of_shards(model, adapters=bool(facility.training.lora.rank))
    if not reason or facility.training.layout.plan:
        return ""
    nodes, gpus = wanted_nodes(facility.deployment, job_template(facility.deployment, federation.file.parent) or "")
    ranks = nodes * gpus or facility.training.ranks
    try:
        layouts = layouts_of_settings(
            facility.training,
            ranks,
            units=len(find_blocks(model)[1]) + 2,
            tokens=1,
            vocabulary=0,
            device="cpu",
            local_ranks=gpus or ranks,
        )
    except CrossFedError:
        return ""
    return reason if layouts[0].sharded else ""


def _separate(facility: Facility, model: Any, task: Task | None, block_tokens: int) -> list[Row]:
    """A row where the model cannot keep the documents of the facility's blocks apart, in the words of its job."""
    reason = refusal_of_positions(type(model), model.config, task or "", block_tokens)
    return [fail(facility.name, "documents", reason, "or take another model")] if reason else []


def shared_tokens(task: Any, separate: bool, block_tokens: int) -> int:
    """Tokens of the blocks of a dataset that documents share without seeing each other; 0: they do not."""
    return block_tokens if separate or task == "preference" else 0


def task_in(word: Any) -> Task | None:
    return word if word in get_args(Task) else None


def task_here(federation: Federation, facility: Facility) -> Task | None:
    """The task of a dataset on this machine; None where it is elsewhere, or is none, which another check reports."""
    return task_in(_dataset_here(federation, facility).get("task"))


def shared_here(federation: Federation, facility: Facility) -> int:
    """`shared_tokens` of a dataset on this machine; 0 as well where it is elsewhere."""
    found = _dataset_here(federation, facility)
    tokens = found.get("block_tokens")
    return shared_tokens(found.get("task"), found.get("documents") == "separate", tokens if type(tokens) is int else 0)


def _dataset_here(federation: Federation, facility: Facility) -> dict[str, Any]:
    """What a dataset on this machine says of itself; {} where it is elsewhere, or is none."""
    if facility.deployment.type != "local":
        return {}
    try:
        found = values_in(federation.path(facility.dataset) / "dataset.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _names(path: Path, task: Task | None) -> tuple[Row, Any]:
    """A row on whether every parameter of the model that a job builds gets its values from some stored tensor.

    And that model on the meta device; None where it does not fit, could not be built, or is not known.
    """
    try:
        config = config_in(path)
        if task is None and not built_for_some_task(config):
            found = f"not looked at: config.json names {named_class(config)}, and a job builds the class of its task"
            return skipped(ME, "tensor names", found), None
        model = model_of(path, task)
        conversion = check_names(path, model)
    except ImportError as error:
        return skipped(ME, "tensor names", f"not looked at: {error}"), None
    except CrossFedError as error:
        advice = "convert it again: python -m coordinator.model --source NAME --out DIR"
        if task is not None:
            advice += f" (a model for the task {task} of the datasets; --classes where they have classes)"
        return fail(ME, "tensor names", str(error), advice), None
    if reason := refusal_for(config, task):
        return fail(ME, "model family", reason, "docs/reference/families.md lists the families that were tried"), None
    other = f"; {len(conversion.unused)} tensors of no parameter are sent on as they are" if conversion.unused else ""
    found = f"{len(conversion.same) + len(conversion.pieces)} parameters and buffers{other}"
    return ok(ME, "tensor names", found), model


def _adapters(name: str, lora: LoraSettings, model: Any, patterns: Patterns) -> list[Row]:
    """What the facility's adapters name that the model has not: its job would refuse it, in the same words; and what of
    them `patterns` keep at the facility, without which no update would be taken."""
    try:
        layers, experts = targets_of(model, lora), parameters_of(model, lora)
    except ImportError as error:
        return [skipped(name, "adapters", f"their layers are not looked at: {error}")]
    except CrossFedError as error:
        return [fail(name, "adapters", str(error), "correct training.lora in federation.yml")]
    adapted = [*layers, *(one.rpartition(".")[0] for one in experts)]
    reasons = [refusal_of_saved(model, module, adapted) for module in lora.modules_to_save]
    advice = "correct training.lora.modules_to_save in federation.yml"
    rows = [fail(name, "adapters", reason, advice) for reason in reasons if reason]
    saved = [
        one
        for one, _ in model.named_parameters()
        if is_saved_module(one.rpartition(".")[0], lora.modules_to_save or HEADS)
    ]
    names = [*(f"{layer}{half}weight" for layer in layers for half in (A, B)), *saved]
    kept = [PREFIX + one for one in names if not patterns.federated(PREFIX + one)]
    if kept:
        what = f"aggregation.include and exclude leave out {len(kept)} tensors of its adapters, such as {kept[0]!r}"
        advice = "all that an adapter trains travels: let the patterns match none of it, or train whole models"
        rows.append(fail(name, "adapters", what, advice))
    return rows
