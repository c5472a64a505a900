"""Maps a model's parameters to the tensors of a checkpoint that stores them under other names or in other pieces.

transformers 5 holds some models otherwise than their published checkpoints do: GPT-NeoX's `embed_out` is its `lm_head`,
the experts of a Mixtral layer (`experts.0.w1`, `experts.0.w3`, ...) are one parameter `experts.gate_up_proj`. Its own
table (`transformers.conversion_mapping`) says how, and `from_pretrained` and `save_pretrained` follow it both ways. So
does this module, without the values: it passes numbers of elements through transformers' own operations and records
where each one comes from. A rank then reads and writes only the bytes of its shard, under the published names.

Where an operation moves no element of the last dimension (all those on experts), whole rows are numbered instead of
elements: 16 bytes a row. Any other operation costs 8 bytes per element of one parameter while its map is made.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.task_class import model_of
from facility.exchange.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive elements of a parameter that lie one after the other in a stored tensor."""

    at: int
    """Of the parameter's elements, row by row: the first."""
    tensor: str
    """Name of the stored tensor."""
    start: int
    """Of the stored tensor's elements: the first."""
    count: int
    """Elements."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The stored tensors that one parameter is made of, or the part of one."""

    tensors: tuple[str, ...]
    table: np.ndarray
    """int64, a row per run in order: first element here, index into `tensors`, first element there, elements."""

    def between(self, first: int, end: int) -> Iterator[Run]:
        """The runs that cover elements `first` to `end` of the parameter, in order."""
        row = int(np.searchsorted(self.table[:, 0], first, side="right")) - 1
        while first < end:
            at, tensor, start, count = (int(value) for value in self.table[row])
            skipped = first - at
            length = min(count - skipped, end - first)
            yield Run(at=first, tensor=self.tensors[tensor], start=start + skipped, count=length)
            first, row = first + length, row + 1


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Where each parameter and persistent buffer of a model is in a checkpoint."""

    same: Mapping[str, str]
    """Name in the model -> the stored tensor that holds it as it is."""
    pieces: Mapping[str, Pieces]
    """Name in the model -> the stored tensors it is made of, for the others."""
    missing: tuple[str, ...]
    """Names in the model that no stored tensor fills."""
    unused: tuple[str, ...]
    """Stored tensors that fill nothing; they are sent on unchanged."""

    @property
    def used(self) -> set[str]:
        """Every stored tensor that fills something."""
        return {*self.same.values(), *(t for pieces in self.pieces.values() for t in pieces.tensors)}


def conversion_of(model: Any, checkpoint: Checkpoint, own: Mapping[str, Any] | None = None) -> Conversion:
    """Map a Hugging Face model (of any device, also meta) to a checkpoint, as `from_pretrained` would.

    `own`: the model's state by name, where the model's own names carry additions (adapters) that the checkpoint lacks.
    Raises `CheckpointError` where a stored tensor has another shape than the model asks for, or is quantised.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = dict(model.state_dict() if own is None else own)
    transforms = _transforms(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    same: dict[str, str] = {}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unused: list[str] = []
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            _check_not_quantized(checkpoint, name, state[target])
        if target not in state:
            unused.append(name)
        elif pattern is None:
            _check_shape(checkpoint, name, target, tuple(state[target].shape))
            same.setdefault(target, name)
        else:
            groups.setdefault(target, (by_pattern[pattern], []))[1].append((pattern, name))
    pieces: dict[str, Pieces] = {}
    for target, (converter, sources) in groups.items():
        pieces |= _pieces(model, state, checkpoint, target, converter, sources)
    missing = tuple(name for name in state if name not in same and name not in pieces)
    return Conversion(same=same, pieces=pieces, missing=missing, unused=tuple(unused))


def _transforms(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def _check_not_quantized(checkpoint: Checkpoint, name: str, parameter: Any) -> None:
    """Refuse weights of 8 bits and fewer: their numbers mean nothing without scales, which lie in other tensors."""
    dtype = checkpoint.tensors[name].dtype
    if parameter.is_floating_point() and not dtype.startswith(("F16", "BF16", "F32", "F64")):
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {name!r} is stored as {dtype}: the checkpoint is quantised, and is not "
            "trained; take the published one in bfloat16, or dequantise this one in transformers and save it"
        )


def _check_shape(checkpoint: Checkpoint, name: str, target: str, shape: tuple[int, ...]) -> None:
    entry = checkpoint.tensors[name]
    if entry.shape != shape:
        other = "" if target == name else f" (the model's {target!r})"
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {name!r}{other} has shape {list(entry.shape)}, "
            f"its config.json asks for {list(shape)}"
        )


def _pieces(
    model: Any,
    state: Mapping[str, Any],
    checkpoint: Checkpoint,
    target: str,
    converter: Any,
    sources: Sequence[tuple[str, str]],
) -> dict[str, Pieces]:
    """What one application of a converter fills, and from where."""
    shapes = [checkpoint.tensors[name].shape for _, name in sources]
    width = shapes[0][-1] if shapes[0] else 1
    by_rows = width > 2 and all(len(shape) > 1 and shape[-1] == width for shape in shapes)
    names = tuple(name for _, name in sources)
    for unit in (width, 1) if by_rows else (1,):
        found = _numbered(model, state, target, converter, sources, shapes, unit)
        result = {
            name: _runs(numbers, names, shapes, unit, tuple(state[name].shape))
            for name, numbers in found.items()
            if name in state
        }
        if result and all(pieces is not None for pieces in result.values()):
            return {name: pieces for name, pieces in result.items() if pieces is not None}
    raise CheckpointError(
        f"{checkpoint.directory}: {target!r} is made of {len(names)} stored tensors ({names[0]!r} of shape "
        f"{list(shapes[0])}, ...), which do not give the shape {list(state[target].shape)} "
        "that its config.json asks for"
    )


def _numbered(
    model: Any,
    state: Mapping[str, Any],
    target: str,
    converter: Any,
    sources: Sequence[tuple[str, str]],
    shapes: Sequence[tuple[int, ...]],
    unit: int,
) -> dict[str, Any]:
    """Numbers of elements, passed through transformers' operation; with `unit` > 1 only two elements of each row."""
    import torch

    chosen = copy.deepcopy(converter)
    begin = 0
    for (pattern, name), shape in zip(sources, shapes, strict=True):
        small = shape if unit == 1 else (*shape[:-1], 2)
        size = math.prod(small)
        chosen.add_tensor(target, name, pattern, torch.arange(begin, begin + size).reshape(small))
        begin += size
    try:
        converted = chosen.convert(target, model=_Shapes(state), config=model.config)
    except (ValueError, RuntimeError, IndexError, KeyError):  # stored tensors that do not fit together
        return {}
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Answers the one question that transformers' operations ask of a model."""

    state: Mapping[str, Any]

    def get_parameter(self, name: str) -> Any:
        return self.state[name]


def _runs(
    numbers: Any, names: tuple[str, ...], shapes: Sequence[tuple[int, ...]], unit: int, shape: tuple[int, ...]
) -> Pieces | None:
    """Runs of the numbers in a converted tensor; None where `unit` or the shape does not fit."""
    found = numbers.numpy()
    sizes = [math.prod(s) // unit for s in shapes]
    if unit > 1:
        if found.ndim != len(shape) or (*found.shape[:-1], unit) != shape or found.shape[-1] != 2:
            return None
        first = found[..., 0].ravel()
        if (first % 2).any() or (found[..., 1].ravel() != first + 1).any():
            return None
        flat = first // 2
    else:
        if found.shape != shape:
            return None
        flat = found.ravel()
    begins = np.concatenate([[0], np.cumsum(sizes)])
    tensor = np.searchsorted(begins, flat, side="right") - 1
    breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(tensor) != 0)) + 1
    at = np.concatenate([[0], breaks])
    count = np.diff(np.concatenate([at, [len(flat)]]))
    table = np.stack([at * unit, tensor[at], (flat[at] - begins[tensor[at]]) * unit, count * unit], axis=1)
    used = np.unique(table[:, 1])
    table[:, 1] = np.searchsorted(used, table[:, 1])
    return Pieces(tensors=tuple(names[i] for i in used), table=table.astype(np.int64))


def unfilled_parameters(model: Any, conversion: Conversion, plain: Callable[[str], str] = str) -> list[str]:
    """Parameters that no stored tensor fills; a tied one is filled under any of its names.

    `plain`: from the model's name of a parameter to the one that `conversion` knows.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(plain(name))
    filled = {*conversion.same, *conversion.pieces}
    return [names[0] for names in aliases.values() if filled.isdisjoint(names)]


def check_names(directory: Path, model: Any = None) -> Conversion:
    """Map a checkpoint to the model that its config.json names, without memory for either.

    `model`: that model, as `model_of` built it; None: it is built here. Raises `CheckpointError` where a parameter
    would be left without values, or transformers knows no such model.
    """
    checkpoint, model = open_checkpoint(directory), model_of(directory) if model is None else model
    conversion = conversion_of(model, checkpoint)
    if names := unfilled_parameters(model, conversion):
        raise CheckpointError(describe_missing(checkpoint, names))
    return conversion


def describe_missing(checkpoint: Checkpoint, missing: Sequence[str]) -> str:
    """One sentence on parameters that a checkpoint does not fill, with names that come near."""
    name = missing[0]
    near = [key for key in checkpoint.tensors if key.split(".")[-2:] == name.split(".")[-2:]][:3]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return (
        f"{checkpoint.directory} holds no tensor for {name!r}{more}, which the model that its config.json describes "
        f"needs; similar names: {near}"
    )
