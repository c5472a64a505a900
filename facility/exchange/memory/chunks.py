"""From how many logits on the loss is computed in chunks of positions, and how many positions a chunk has."""

from __future__ import annotations

import copy
from typing import Any

from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.task_words import Task

LARGE_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Logits of one forward pass in float32 from which on they are computed in chunks: what caches hold; what memory does
not notice."""
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
"""Logits of one chunk in float32. On a GPU every chunk also reads and writes the gradient of the weight in float32."""
CHUNK_ROWS = {"cpu": 128, "cuda": 1024}
"""Least positions of a chunk, whatever the vocabulary: each chunk reads the weight and its gradient once."""
CHUNKS = 4
"""Least chunks of a forward pass."""
WHOLE_LOGITS: tuple[Task, ...] = ("preference", "image-classification")
"""Tasks whose logits are always computed at once: a pair's loss is not a sum over positions, and classes are few. So
are those of private training, since a record's own gradient needs its logits."""


def rows_of(positions: int, vocabulary: int, device: str = "cpu") -> int:
    """Positions of a chunk: as many as `CHUNK_BYTES` hold, `CHUNK_ROWS` at least, but a quarter of all at most."""
    fitting = max(CHUNK_ROWS[device], CHUNK_BYTES[device] // (4 * vocabulary))
    return min(fitting, -(-positions // CHUNKS))


def wanted_rows(training: TrainingSettings, positions: int, vocabulary: int, device: str) -> int:
    """Positions of a chunk of a forward pass over so many, where the model allows chunks; 0: all logits at once."""
    small = training.chunked_loss == "auto" and 4 * positions * vocabulary <= LARGE_BYTES[device]
    return 0 if training.chunked_loss == "never" or small else rows_of(positions, vocabulary, device)


def obstacle_to_chunks(config: Any, factory: Any, attention: str) -> str:
    """Why a model's output layer cannot compute the loss itself, chunk by chunk; empty where it can.

    `factory`: the class of transformers that builds a model of `config`. One forward pass without memory (FakeTensor)
    shows whether what the layer returns is what the model returns: a model that scales or caps its logits afterwards
    does something else.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = copy.deepcopy(config)
    config.use_cache = False
    returned: list[Any] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = factory.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            return f"{type(model).__name__} has no linear output layer over its vocabulary"
        head.register_forward_hook(lambda module, args, output: returned.append(output))
        logits = model.eval()(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits
    if len(returned) != 1 or returned[0] is not logits:
        return f"{type(model).__name__} changes its logits after the output layer"
    return ""
