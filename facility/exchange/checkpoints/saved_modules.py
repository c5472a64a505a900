"""Modules that are to be trained whole beside adapters, and what is refused because it has no weight of its own.

The coordinator asks before a federation starts, the trainer when it adds the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from facility.exchange.checkpoints.adapters import is_saved_module


def saves_parameter(name: str, wanted: Sequence[str]) -> bool:
    """Whether a parameter belongs to a module that is saved; adapted layers have their adapters instead."""
    return ".base_layer." not in name and is_saved_module(name.rpartition(".")[0], wanted)


def refusal_of_saved(model: Any, wanted: str, adapted: Sequence[str]) -> str:
    """Why a name of `training.lora.modules_to_save` cannot be trained whole in this model; empty: it can.

    `model`: without adapters. `adapted`: full names of the modules that get them, and are frozen below.
    """
    beside = [name for name, _ in model.named_parameters() if not name.startswith(tuple(f"{one}." for one in adapted))]
    if any(saves_parameter(name, [wanted]) for name in beside):
        return ""
    if reason := refusal_of_tied(model, wanted):
        return reason
    heads = sorted({name.partition(".")[0] for name, _ in model.named_children()})
    return (
        f"training.lora.modules_to_save names {wanted!r}, which is not a module of it outside its adapters; its heads "
        f"are {', '.join(heads)}"
    )


def refusal_of_tied(model: Any, wanted: str) -> str:
    """Why a name of `training.lora.modules_to_save` cannot be trained in this model; empty: it is not tied.

    A module that holds a parameter of its own beside the tied one, such as a bias, is trained for that.
    """
    if any(saves_parameter(name, [wanted]) for name, _ in model.named_parameters()):
        return ""
    if not (shared := shared_with(model, wanted)):
        return ""
    return (
        f"training.lora.modules_to_save names {wanted!r}, whose weight is that of {shared} "
        f"(tie_word_embeddings): name {shared.rpartition('.')[2]!r} instead, which trains both"
    )


def shared_with(model: Any, wanted: str) -> str:
    """The module that holds the weight of the named one, too; '' where the weight is its own."""
    holders: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        other = holders.setdefault(id(parameter), module)
        if other != module and is_saved_module(module, [wanted]):
            return other
    return ""
