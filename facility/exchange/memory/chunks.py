"""From how many logits on the loss is computed in chunks of positions, and how many positions a chunk has."""

from __future__ import annotations

from facility.exchange.messages.settings import TrainingSettings

LARGE_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Logits of one forward pass in float32 from which on they are computed in chunks: what caches hold; what memory does
not notice."""
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
"""Logits of one chunk in float32. On a GPU every chunk also reads and writes the gradient of the weight in float32."""
CHUNK_ROWS = {"cpu": 128, "cuda": 1024}
"""Least positions of a chunk, whatever the vocabulary: each chunk reads the weight and its gradient once."""
CHUNKS = 4
"""Least chunks of a forward pass."""


def rows_of(positions: int, vocabulary: int, device: str = "cpu") -> int:
    """Positions of a chunk: as many as `CHUNK_BYTES` hold, `CHUNK_ROWS` at least, but a quarter of all at most."""
    fitting = max(CHUNK_ROWS[device], CHUNK_BYTES[device] // (4 * vocabulary))
    return min(fitting, -(-positions // CHUNKS))


def wanted_rows(training: TrainingSettings, positions: int, vocabulary: int, device: str) -> int:
    """Positions of a chunk of a forward pass over so many, where the model allows chunks; 0: all logits at once."""
    small = training.chunked_loss == "auto" and 4 * positions * vocabulary <= LARGE_BYTES[device]
    return 0 if training.chunked_loss == "never" or small else rows_of(positions, vocabulary, device)
