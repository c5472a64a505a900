"""What a federation of adapters ends with, as a directory that `peft.PeftModel.from_pretrained` loads.

OUT/adapter_model.safetensors, OUT/adapter_config.json   the adapters
OUT/merged/                                              on request: base and adapters as one plain checkpoint
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from coordinator.models.adapter_serving import served_by_vllm
from coordinator.models.published import no_bars_in_a_file, refuse_files_elsewhere
from facility.exchange.checkpoints.adapter_twins import twins_of, with_modules, write_adapter
from facility.exchange.checkpoints.adapters import CONFIG, is_adapter, loaded_as, read_adapter_config
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import copy_named_templates
from facility.exchange.checkpoints.image_processor import FILE as PROCESSOR
from facility.exchange.checkpoints.task_class import OWN_ATTENTION
from facility.exchange.checkpoints.tokenizer import VOCABULARIES
from facility.exchange.errors import InputError, first_line
from facility.exchange.files.durable import as_umask_allows, new_directory
from facility.exchange.messages.strict_json import Fields

MERGED = "merged"
MOST_TARGETS = 100_000
TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "tekken", "chat_template")
"""Beginnings of the names of a tokenizer's files."""


def export_adapter(model: Path, *, base: Path, out: Path, merged: bool = False) -> str:
    """Write the adapters of `model`, a round's model, to `out`, which appears atomically; returns what was written.

    peft loads the result over `base` before it appears. Raises `InputError` where they do not belong together.
    """
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another --out")
    checkpoint = open_checkpoint(model)
    names = sorted(filter(is_adapter, checkpoint.tensors))
    if not names:
        raise InputError(f"{model} holds no adapters: expected the model of a federation with training.lora")
    configuration = read_configuration(model)
    loaded = load_base(base)
    twins = twins_of(loaded, names)
    configuration = with_modules(configuration, twins) | loaded_as(type(loaded).__name__)
    sources = {name: name for name in names} | twins
    names = sorted(sources)
    with new_directory(out) as temporary:
        write_adapter(temporary, checkpoint, sources, configuration | {"base_model_name_or_path": str(base)})
        adapted = load_adapter(temporary, loaded, names)
        if merged:
            write_merged(temporary / MERGED, adapted, base)
    written = f"{out}: {len(names)} adapter tensors of rank {configuration['r']}, loaded by peft over {base}"
    beside = f"; merged model in {out / MERGED}" if merged else ""
    return f"{written}{beside}; {served_by_vllm(configuration, names)}"


def read_configuration(adapter: Path) -> dict[str, Any]:
    """The known keys of an adapter's `adapter_config.json`; raises `InputError` for other types or kinds."""
    file = adapter / CONFIG
    fields = Fields(raw=read_adapter_config(adapter), where=str(file))
    targets = fields.raw.get("target_modules")
    if not isinstance(targets, list) or len(targets) > MOST_TARGETS or not all(isinstance(t, str) for t in targets):
        raise InputError(f"{file}: target_modules is {targets!r:.200}, expected a list of names of layers")
    saved = names_in(fields.raw, "modules_to_save", file)
    return {
        "peft_type": fields.one_of("peft_type", "LORA", ("LORA",)),
        "r": fields.whole("r", least=1),
        "lora_alpha": fields.number("lora_alpha"),
        "lora_dropout": fields.number("lora_dropout", 0.0, most=1.0),
        "target_modules": targets,
        "use_rslora": fields.raw.get("use_rslora") is True,
        "use_dora": fields.raw.get("use_dora") is True,
        "target_parameters": names_in(fields.raw, "target_parameters", file) or None,
        "modules_to_save": saved or None,
        "bias": "none",
        "inference_mode": True,
    }


def names_in(raw: dict[str, Any], key: str, file: Path) -> list[str]:
    """A list of names of modules or parameters, empty where there is none."""
    found = raw.get(key) or []
    if not isinstance(found, list) or len(found) > MOST_TARGETS or not all(isinstance(name, str) for name in found):
        raise InputError(f"{file}: {key} is {found!r:.200}, expected a list of names")
    return found


def load_base(base: Path) -> Any:
    """The base model in the class that its config.json names, in its own dtype. Raises `InputError`."""
    import transformers

    refuse_files_elsewhere(base)
    if os.path.lexists(base / CONFIG):  # transformers would load it too, and peft import what it names
        raise InputError(f"{base} holds adapters already ({CONFIG}); expected a plain base model")
    no_bars_in_a_file()
    try:
        configuration = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        factory = getattr(transformers, (configuration.architectures or ["AutoModelForCausalLM"])[0])
        return factory.from_pretrained(
            base, dtype="auto", use_safetensors=True, attn_implementation=OWN_ATTENTION
        ).eval()
    except Exception as error:  # whatever the values of config.json lead to
        raise InputError(f"{base} is not a model that transformers loads: {first_line(error)}") from None


def load_adapter(directory: Path, base: Any, names: list[str]) -> Any:
    """`PeftModel` over the base; raises `InputError` where a tensor has no place, another shape, or is missing."""
    from peft import PeftModel, get_peft_model_state_dict

    try:
        adapted = PeftModel.from_pretrained(base, str(directory))
    except (ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"the adapters do not fit the base model: {first_line(error)}") from None
    if differing := sorted(set(get_peft_model_state_dict(adapted)) ^ set(names)):
        raise InputError(
            f"the adapters do not fit the base model: {differing[0]!r} ({len(differing)} in all) is only in one of both"
        )
    return adapted


def write_merged(directory: Path, adapted: Any, base: Path) -> None:
    """The base's weights plus alpha / rank * B A, as a plain checkpoint; beside it the base's tokenizer or image
    processor."""
    adapted.merge_and_unload().save_pretrained(directory)
    for path in base.iterdir():
        of_inputs = path.name.startswith(TOKENIZER) or path.suffix in VOCABULARIES or path.name == PROCESSOR
        if path.is_file() and not (directory / path.name).exists() and of_inputs:
            shutil.copyfile(path, directory / path.name)
    for path in directory.iterdir():
        path.chmod(as_umask_allows(0o644))
    copy_named_templates(base, directory)
