"""Sizes of a model by kind of tensor, from its configuration and the headers of its files; no weight is read.

Estimates of disk, transfers and memory (`coordinator.preflight.disk`, `coordinator.memory`) are made from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.adapters import (
    HEADS,
    MAGNITUDE,
    PREFIX,
    A,
    B,
    is_adapter,
    is_saved_module,
    is_targeted,
)
from facility.exchange.checkpoints.checkpoint import FLOATS, ITEM_BYTES, open_checkpoint
from facility.exchange.checkpoints.families import checked_text_part, most_positions
from facility.exchange.checkpoints.image_processor import image_processor_digest
from facility.exchange.checkpoints.labels import labels_in, other_problem
from facility.exchange.checkpoints.model_files import read_model_file
from facility.exchange.checkpoints.moments import sent_bytes as moments_sent
from facility.exchange.checkpoints.patterns import Patterns, matches_any
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from facility.exchange.delta_codecs import FULL, declared_codec
from facility.exchange.errors import CheckpointError
from facility.exchange.memory.optimizer_state import state_bytes, with_second_moments
from facility.exchange.messages.settings import TrainingSettings

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_BYTES = 4
"""Of a value of an update."""
MASKED_MOMENTS = 2
"""Bytes of moments under masks, over those of moments that are not masked."""
EVERYTHING = Patterns()
IN_A_BLOCK = re.compile(r"\.\d+\.")
"""In the name of a module of a block: the block's number."""


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model's properties that the estimates use."""

    parameters: int
    bytes: int
    """Size of the tensors as stored."""
    vocabulary: int
    positions: int
    """Longest sequence; 0: unlimited."""
    hidden: int
    layers: int
    heads: int
    tokenizer: str | None = None
    """Which tokenizer the model carries (`tokenizer_digest`), if any."""
    image_processor: str | None = None
    """Which image processor it carries (`image_processor_digest`), if any."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of its tensors; empty: not known, and adapters count as the whole model."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of its tensors, by safetensors' names of them."""
    inner: int = 0
    """Width of a block's feed-forward network; 0: not known."""
    family: str = ""
    """`model_type` of its configuration."""
    labels: Sequence[str] = ()
    """Of a classifier's head: the names of its classes, by number."""
    problem: str = ""
    """What the head answers, where config.json says that it is not one class of several."""

    def trained(self, training: TrainingSettings) -> int:
        """Parameters that are trained: all but the frozen ones, or those of the adapters and of `modules_to_save`.

        Without `targets` every matrix in a block counts as a linear layer; without `modules_to_save` a classifier's
        head is saved, as the trainer does. A model that holds adapters has them trained as they are.
        """
        if not self.shapes:
            return self.parameters
        return sum(map(math.prod, self.trained_shapes(training)))

    def trained_shapes(self, training: TrainingSettings) -> list[tuple[int, ...]]:
        """Shapes of the tensors that are trained; empty where they are not known."""
        return [shape for _, shape in self.trained_tensors(training)]

    def trained_tensors(self, training: TrainingSettings) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that are trained; empty where they are not known."""
        return [
            (name, shape)
            for name, shape in self._own_or_adapters(training)
            if is_adapter(name) or not matches_any(name, training.freeze)
        ]

    def _own_or_adapters(self, training: TrainingSettings) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors that an update may hold, frozen ones included."""
        lora = training.lora
        if not lora.rank:
            return [(name, tuple(shape)) for name, shape in self.shapes.items()]
        if own := [(name, tuple(shape)) for name, shape in self.shapes.items() if is_adapter(name)]:
            return own
        saved = lora.modules_to_save or HEADS
        found: list[tuple[str, tuple[int, ...]]] = []
        for name, shape in self.shapes.items():
            module = name.rpartition(".")[0]
            if is_saved_module(module, saved):
                found.append((name, tuple(shape)))
            elif is_matrix_of_a_block(name, shape):
                if not lora.targets or is_targeted(module, lora.targets):
                    found += [
                        (f"{module}{A}weight", (lora.rank, shape[1])),
                        (f"{module}{B}weight", (shape[0], lora.rank)),
                    ]
                    found += [(f"{module}{MAGNITUDE}", (shape[0],))] if lora.dora else []
            elif is_targeted(name, lora.parameters) and len(shape) == 3:
                pairs = zip((A, B), shape[1:], strict=True)
                found += [(f"{name}{factor}weight", (lora.rank * shape[0], size)) for factor, size in pairs]
        return found

    def written(self, training: TrainingSettings, federated: Patterns = EVERYTHING, *, whole: bool = False) -> int:
        """Bytes of an update: what is frozen in the model's own dtype, where nothing is exported in float32.

        `whole`: with what is not `federated`, which stays at the facility in float32, as the trainer writes it.
        """
        item = BYTES[training.export_dtype]
        if not self.shapes:
            return self.parameters * item
        adapters, trained = training.lora.rank > 0, self.trained_tensors(training)
        total, changed = 0, {name for name, _ in trained}
        for name, shape in trained if adapters else self._own_or_adapters(training):
            dtype, stays = self.dtypes.get(name, ""), not federated.federated(in_update(name, training))
            if stays and not whole:
                continue
            kept = not adapters and dtype and (dtype not in FLOATS or (name not in changed and item < MOST_BYTES))
            total += math.prod(shape) * (ITEM_BYTES[dtype] if kept else MOST_BYTES if stays else item)
        return total

    def changed(self, *trainings: TrainingSettings, federated: Patterns = EVERYTHING) -> int:
        """Values of a round's model that differ from the one before: those that some facility trains, and federated.

        Of one facility's settings: values of its update that differ from the received model.
        """
        if not self.shapes:
            return self.parameters
        tensors = dict(tensor for training in trainings for tensor in self.trained_tensors(training))
        return sum(
            math.prod(shape) for name, shape in tensors.items() if federated.federated(in_update(name, trainings[0]))
        )

    def averaged(self, training: TrainingSettings, federated: Patterns = EVERYTHING) -> int:
        """Values that the coordinator averages, whether or not they change: of the adapters, or all that are
        federated."""
        if not self.shapes:
            return self.parameters
        if training.lora.rank:
            return self.changed(training, federated=federated)
        return sum(math.prod(shape) for name, shape in self.shapes.items() if federated.federated(name))

    def not_federated(self, training: TrainingSettings, federated: Patterns) -> int:
        """Bytes that a whole model which is received holds of tensors that are not federated."""
        names = [] if training.lora.rank else [name for name in self.shapes if not federated.federated(name)]
        return sum(math.prod(self.shapes[name]) * ITEM_BYTES.get(self.dtypes.get(name, ""), 2) for name in names)

    def received(self, training: TrainingSettings) -> int:
        """Bytes of a model as a facility receives it: with adapters in it, or these alone where it has the base."""
        if not training.lora.rank:
            return self.bytes
        return self.written(training) + (0 if training.lora.base else self.bytes)

    def mean_walk(self, training: TrainingSettings) -> int:
        """Bytes of the mean walk that comes with a model from the second round on, where drift is corrected."""
        return MEAN_WALK_BYTES * self.trained(training) if training.drift_correction else 0

    def moments(self, training: TrainingSettings) -> int:
        """Bytes of the moments that travel each way, in a round in which they do; 0 where the shapes are not known."""
        form, shared = training.optimizer_state_form, training.optimizer_state == "shared"
        second = with_second_moments(training, self.trained_tensors(training)) if shared else []
        first = self.trained_shapes(training) if training.first_moments == "mean" else []
        return moments_sent(second, first, form=form)

    def returned(self, training: TrainingSettings, federated: Patterns = EVERYTHING) -> int:
        """Bytes of an update on the link, without its moments. Adapters travel whole in any encoding."""
        whole = self.written(training, federated)
        if training.lora.rank:
            return whole
        changed = self.changed(training, federated=federated)
        return self.travelling(whole, training.encoding, training.sparse_density, changed)

    def sent_back(self, training: TrainingSettings, federated: Patterns = EVERYTHING, *, masked_bits: int = 0) -> int:
        """Bytes of an update on the link, with its moments. `masked_bits`: of a value under masks; 0: it has none."""
        if masked_bits:
            return self.averaged(training, federated) * masked_bits // 8 + MASKED_MOMENTS * self.moments(training)
        return self.returned(training, federated) + self.moments(training)

    def travelling(self, full: int, encoding: str, density: float, changed: int | None = None) -> int:
        """Bytes on the link of a checkpoint that takes `full` bytes whole, of whose values so many are `changed`; None:
        all. What is not is in no message."""
        if encoding == FULL:
            return full
        values = self.parameters if changed is None else changed
        density = min(1.0, density * self.parameters / values) if values else density  # a share of all values
        return round(declared_codec(encoding).message_bytes(values, density, self._tensors_of(values)))

    def travelling_at_most(self, full: int, encoding: str, density: float, changed: int | None = None) -> int:
        """Most bytes that a message can have, for disks: a lossless one is as large as what changed asks for."""
        if encoding == FULL:
            return full
        values = self.parameters if changed is None else changed
        if changed is not None and self.parameters:
            full = math.ceil(full * min(1.0, changed / self.parameters))
        return math.ceil(declared_codec(encoding).most_bytes(values, density, full, self._tensors_of(values)))

    def _tensors_of(self, values: int) -> int:
        """About how many tensors hold so many of the values; 0 where the shapes are not known."""
        return math.ceil(len(self.shapes) * min(1.0, values / max(1, self.parameters)))


def is_matrix_of_a_block(name: str, shape: Sequence[int]) -> bool:
    """Whether the tensor of that name counts as the weight of a linear layer of a block."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and IN_A_BLOCK.search(module) is not None and not is_adapter(name)


def model_figures(directory: Path) -> ModelFigures:
    """Raises `InputError` for damaged weights, config.json, tokenizer.json or preprocessor_config.json."""
    checkpoint = open_checkpoint(directory)
    whole = read_model_file(directory)
    config = checked_text_part(whole, directory)

    def first(*names: str) -> int:
        return next((_largest(config[name], name) for name in names if config.get(name)), 0)

    return ModelFigures(
        parameters=checkpoint.parameters,
        bytes=checkpoint.bytes,
        vocabulary=first("vocab_size"),
        positions=most_positions(config),
        hidden=first("hidden_size", "n_embd", "dim", "d_model", "emb_dim"),
        layers=first("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        heads=first("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        tokenizer=tokenizer_digest(directory),
        image_processor=image_processor_digest(directory),
        shapes={name: entry.shape for name, entry in checkpoint.tensors.items()},
        dtypes={name: entry.dtype for name, entry in checkpoint.tensors.items()},
        inner=first("intermediate_size"),
        family=str(config.get("model_type", "")),
        labels=labels_in(whole),
        problem=other_problem(whole),
    )


def _largest(value: Any, name: str) -> int:
    """A number of a configuration; the largest of those by block (Gemma 3n) or by stage (SegFormer, PVT)."""
    try:
        return max(map(int, value)) if isinstance(value, list) else int(value)
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"config.json: {name} is {value!r:.60}, expected a number, or one for each block"
        ) from None


WALK_BYTES = 4
"""Of a parameter's own walk at a facility, in memory and on disk, and of the mean walk in the coordinator's state."""
MEAN_WALK_BYTES = 1
"""Of a parameter in the mean walk that is sent with a model."""


def in_update(name: str, training: TrainingSettings) -> str:
    """The name under which an update holds a tensor that is trained: of adapters with peft's prefix."""
    return PREFIX + name if training.lora.rank and not name.startswith(PREFIX) else name


def moments_bytes(model: ModelFigures, training: TrainingSettings) -> int:
    """Bytes of the optimizer's state; with it those of the facility's own walk where drift is corrected."""
    trained = model.trained(training)
    tensors = model.trained_tensors(training) or [("", (trained,))]
    return round(state_bytes(training, tensors)) + (WALK_BYTES * trained if training.drift_correction else 0)
