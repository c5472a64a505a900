"""Which of transformers' classes a job builds for a checkpoint, by the task of its dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.model_files import read_model_file
from facility.exchange.errors import CheckpointError, named_line
from facility.exchange.task_words import Task

CAUSAL = "AutoModelForCausalLM"
FACTORIES: dict[Task, str] = {
    "causal-lm": CAUSAL,
    "chat": CAUSAL,
    "preference": CAUSAL,
    "masked-lm": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}

OWN_ATTENTION = "eager"
"""Attention of transformers itself, named wherever a model is made or loaded: else config.json decides, which may name
a kernel of the hub, that is code."""

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
"""Keys of config.json that say how many blocks are stacked."""
MOST_LAYERS = 10_000
BUILT_IN = ("eager", "sdpa", "flex_attention")


def check_layers(config: Any, where: Path | str) -> None:
    """Raise `CheckpointError` where a configuration, or a part of it, has layers without end, or fewer than none:
    transformers makes each of them, in memory, before it compares anything with the weights."""
    parts = [config]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            parts.append(value)
            if key in LAYERS and isinstance(value, int) and not 0 <= value <= MOST_LAYERS:
                raise CheckpointError(f"{where} has {key}: {value:.6g}, expected 0 to {MOST_LAYERS:,}")


def config_in(directory: Path) -> Any:
    """transformers' configuration of a checkpoint, from disk only. Raises `CheckpointError`."""
    import transformers

    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(directory, local_files_only=True)
    except Exception:  # the same, and why, is said below
        raw = {}
    check_layers(raw, Path(directory) / "config.json")
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever its values lead to in transformers
        raise CheckpointError(f"{directory}/config.json cannot be used: {named_line(error)}") from None


def check_attention(directory: Path) -> None:
    """Raise `CheckpointError` where config.json names attention that is not transformers' own, in whatever part.

    For programs that load a model by its configuration alone. transformers itself writes no such key.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        return
    parts: list[Any] = [read_model_file(directory)]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            parts.append(value)
            if key.endswith("attn_implementation") and value not in (None, *BUILT_IN):
                raise CheckpointError(
                    f"{file} has {key}: {str(value)[:100]!r}, expected none or {', '.join(BUILT_IN)}: another may be "
                    "fetched from the hub, and is code; remove the key"
                )


def task_of_classes(architectures: object) -> Task:
    """The task of a model by the classes that its config.json names; text that goes on where they say nothing."""
    names = [str(one) for one in architectures] if isinstance(architectures, list) else []
    ends = {factory.removeprefix("AutoModel"): task for task, factory in FACTORIES.items() if factory != CAUSAL}
    return next((task for end, task in ends.items() if any(name.endswith(end) for name in names)), "causal-lm")


def named_class(config: Any) -> str:
    """The class that config.json names; of one that names none, a causal language model."""
    return str((config.architectures or [CAUSAL])[0])


def built_for_some_task(config: Any) -> bool:
    """Whether the class that config.json names is one that a job builds for it, for some task.

    Where it is not (a bare `BertModel`), a job builds another one, whose modules may have other full names.
    """
    import transformers

    named = named_class(config)
    for factory in set(FACTORIES.values()):
        mapping = getattr(transformers, factory)._model_mapping
        kinds = mapping.get(type(config), ())
        if named == factory or named in [one.__name__ for one in (kinds if isinstance(kinds, tuple) else (kinds,))]:
            return True
    return False


def model_of(directory: Path, task: Task | None = None) -> Any:
    """The model that a job builds for a dataset of that task, on the meta device and with its weights tied.

    None: the model that the checkpoint's config.json names. Raises `CheckpointError` where transformers knows no such
    model.
    """
    import torch
    import transformers

    config = config_in(directory)
    named = named_class(config) if task is None else FACTORIES[task]
    kind = getattr(transformers, named, None)
    if kind is None:
        raise CheckpointError(
            f"{directory}/config.json names the model class {named}, which transformers does not have"
        )
    if named.startswith("AutoModel") and type(config) not in kind._model_mapping:
        raise CheckpointError(
            f"{directory}/config.json is of a {config.model_type} model, of which transformers has none for the task "
            f"{task or 'causal-lm'} ({named})"
        )
    config.architectures = config.architectures or []  # transformers looks there where a family has several classes
    with torch.device("meta"):
        make = kind.from_config if named.startswith("AutoModel") else kind._from_config
        try:
            model = make(config, attn_implementation=OWN_ATTENTION)
        except Exception as error:
            said = f"transformers cannot build the {config.model_type} model that it describes: {named_line(error)}"
            raise CheckpointError(f"{directory}/config.json cannot be used: {said:.400}") from None
    model.tie_weights()
    return model
