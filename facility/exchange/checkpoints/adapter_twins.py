"""An embedding that is trained whole beside adapters, in a model whose head has the same weight.

CrossFed trains one weight under both names. peft's `modules_to_save` makes a copy for the module that is named, and the
other keeps the base's weight: an adapter that peft loads as it was trained brings the weight under both names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.adapters import CONFIG, PREFIX, is_adapter, is_added, read_adapter_config
from facility.exchange.checkpoints.checkpoint import ADAPTER, Checkpoint, open_checkpoint
from facility.exchange.checkpoints.task_class import model_of
from facility.exchange.errors import InputError
from facility.exchange.files.durable import as_umask_allows, write_json


def twins_of(model: Any, names: Collection[str]) -> dict[str, str]:
    """Other names of the weights that the adapter tensors `names` hold -> the one among these, as an adapter has both.

    `model`: the base, without adapters and with its weights tied. Only weights of single layers are looked at: those of
    a module with modules in it cannot be saved by themselves.
    """
    found: dict[str, str] = {}
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if next(model.get_submodule(name.rpartition(".")[0]).children(), None) is None:
            groups.setdefault(id(parameter), []).append(PREFIX + name)
    for group in groups.values():
        held = next((name for name in group if name in names), None)
        if held is not None:
            found |= {other: held for other in group if other != held}
    return found


def with_modules(configuration: dict[str, Any], twins: Collection[str]) -> dict[str, Any]:
    """The configuration of an adapter that brings these tensors, too."""
    modules = {name.removeprefix(PREFIX).rpartition(".")[0] for name in twins}
    if not modules:
        return configuration
    return configuration | {"modules_to_save": sorted({*(configuration["modules_to_save"] or ()), *modules})}


def without_modules(configuration: dict[str, Any], twins: Collection[str]) -> dict[str, Any]:
    """The configuration of an adapter without these tensors."""
    modules = {name.removeprefix(PREFIX).rpartition(".")[0] for name in twins}
    kept = [one for one in configuration["modules_to_save"] or () if not any(_ends(m, one) for m in modules)]
    return configuration | {"modules_to_save": kept or None}


def check_twins(adapter: Checkpoint, twins: dict[str, str]) -> None:
    """Raise `InputError` unless the adapter brings each weight under all of its names, and the same one."""
    import torch

    for other, held in twins.items():
        if other not in adapter.tensors or not torch.equal(adapter.read(other), adapter.read(held)):
            raise InputError(
                f"{adapter.directory} trains {held.removeprefix(PREFIX)!r} apart from {other.removeprefix(PREFIX)!r}, "
                "which are one weight in the base (tie_word_embeddings) and are trained as one here; take an adapter "
                "that holds the same weight under both names, as --export-adapter writes it, or one without them"
            )


def write_adapter(
    directory: Path, checkpoint: Checkpoint, sources: Mapping[str, str], configuration: dict[str, Any]
) -> None:
    """Write both files as peft names them. `sources`: the checkpoint's tensor by the name that it is written under."""
    from safetensors.torch import save_file

    tensors = {name: checkpoint.read(source) for name, source in sorted(sources.items())}
    save_file(tensors, directory / ADAPTER, metadata={"format": "pt"})
    os.chmod(directory / ADAPTER, as_umask_allows(0o644))  # safetensors writes 0600 whatever the umask
    write_json(directory / CONFIG, configuration)


def write_as_loaded(model: Path, base: Path, directory: Path) -> bool:
    """Write the adapters of `model` to `directory` as peft loads them over `base`, each weight under all of its names.

    False, and nothing is written, where they are that already in `model`.
    """
    checkpoint = open_checkpoint(model)
    twins = twins_in(checkpoint, base)
    if not twins:
        return False
    names = [name for name in checkpoint.tensors if is_adapter(name)]
    configuration = with_modules({"modules_to_save": None} | read_adapter_config(model), twins)
    write_adapter(directory, checkpoint, {name: name for name in names} | twins, configuration)
    return True


def twins_in(adapters: Checkpoint, described: Path) -> dict[str, str]:
    """`twins_of` for the adapters of a round's model. `described`: a directory with the base's config.json; no weight
    is read."""
    names = [name for name in adapters.tensors if is_adapter(name)]
    return {} if all(map(is_added, names)) else twins_of(model_of(described), names)


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)
