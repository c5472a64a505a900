"""From encoded documents to the arrays of a dataset directory, and what its manifest says of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from facility.dataset import SPLITS, DatasetError, Documents, SplitEntry, Task
from facility.exchange.messages.manifest import sha256_of
from facility.preparing.encoding import EncodedBatch, Encoding, encode_all
from facility.preparing.marked import MarkedStream, WholeDocuments
from facility.preparing.overlap import check_overlap
from facility.preparing.packing import Packer
from facility.preparing.pairs import AnswerPairs
from facility.preparing.reading import Reading
from facility.preparing.rows import LabelledRows, class_names, pad_token_id
from facility.preparing.sources import Document


class Wanted(Protocol):
    """What of a request decides how documents are written."""

    @property
    def task(self) -> Task: ...
    @property
    def sharing(self) -> Documents: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def processes(self) -> int: ...
    @property
    def allow_overlap(self) -> bool: ...
    @property
    def tokenizer(self) -> Path: ...


class Writer(Protocol):
    """Writes the blocks of one split and counts."""

    tokens: int

    @property
    def blocks(self) -> int: ...
    @property
    def tail_tokens(self) -> int: ...
    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None: ...
    def close(self) -> None: ...


def writer_of(request: Wanted, tokenizer: Any, directory: Path, split: str) -> Any:
    """The writer that task and sharing ask for."""
    if request.task == "classification":
        return LabelledRows(directory, split, request.block_tokens, pad_token_id(tokenizer, request.tokenizer))
    if request.task == "preference":
        filler = pad_token_id(tokenizer, request.tokenizer)
        return AnswerPairs(directory, split, request.block_tokens, filler=filler)
    if request.sharing in ("separate", "padded") and request.task == "chat":
        filler, alone = pad_token_id(tokenizer, request.tokenizer), request.sharing == "padded"
        return WholeDocuments(directory, split, request.block_tokens, filler=filler, alone=alone)
    if request.task == "chat" or request.sharing == "separate":
        return MarkedStream(directory, split, request.block_tokens, apart=request.sharing == "separate")
    return Packer(directory / f"{split}.npy", request.block_tokens)


def write_splits(
    request: Wanted, reading: Reading, tokenizer: Any, encoding: Encoding, directory: Path
) -> dict[str, Any]:
    """Write the arrays of both splits; returns the manifest's fields that only now are known."""
    writers = {split: writer_of(request, tokenizer, directory, split) for split in SPLITS}
    lengths = {split: array("Q") for split in SPLITS}
    for batch, encoded in encode_all(reading.batches(), encoding, processes=request.processes):
        writers[batch.split].append(encoded, batch.documents)
        lengths[batch.split].extend(encoded.lengths.tolist())
    labelled = request.task == "classification"
    classes = class_names([writer.labels for writer in writers.values()]) if labelled else []
    splits = {}
    for split, writer in writers.items():
        writer.close(*([classes] if labelled else []))
        check_blocks(writer, split, reading.documents[split], request.block_tokens)
        splits[split] = entry_of(writer, split, reading, directory, lengths[split])
    if not request.allow_overlap:
        check_overlap(splits["validation"])
    return {
        "classes": classes,
        "pad_token_id": pad_token_id(tokenizer, request.tokenizer) if labelled else None,
        "splits": splits,
    }


def check_blocks(writer: Writer, split: str, documents: int, block_tokens: int) -> None:
    """Raises `DatasetError` for a split without a block."""
    if writer.blocks:
        return
    hint = "give more text" if split == "train" else "give more text, or a larger --validation-share"
    dropped = getattr(writer, "dropped", 0)
    why = f" ({dropped} of them bear no loss within {block_tokens} tokens)" if dropped else ""
    raise DatasetError(
        f"{split}: {documents} documents{why} gave {writer.tokens} tokens, not one block of {block_tokens}; "
        f"{hint}, or {'a larger' if dropped else 'a smaller'} --block-tokens"
    )


def quantiles(lengths: Sequence[int]) -> list[int]:
    """Least, median, 95th percentile and most, each a length that occurs."""
    ordered = sorted(lengths)
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.0, 0.5, 0.95, 1.0)] if ordered else []


def entry_of(writer: Any, split: str, reading: Reading, directory: Path, lengths: Sequence[int]) -> SplitEntry:
    """What the manifest says of a split."""
    digests = {
        name: sha256_of(file)
        for name, suffix in (("rows_sha256", "rows"), ("marks_sha256", "marks"))
        if (file := directory / f"{split}.{suffix}.npy").is_file()
    }
    return SplitEntry(
        blocks=writer.blocks,
        documents=reading.documents[split],
        empty_documents=reading.empty[split],
        tokens=writer.tokens,
        tail_tokens=writer.tail_tokens,
        truncated_documents=getattr(writer, "truncated", 0),
        dropped_documents=getattr(writer, "dropped", 0),
        loss_tokens=getattr(writer, "loss_tokens", 0),
        padding_tokens=getattr(writer, "padding_tokens", 0),
        duplicate_documents=reading.duplicates[split],
        document_tokens=quantiles(lengths),
        overlapping_documents=reading.digests.overlapping() if split == "validation" else 0,
        sha256=sha256_of(directory / f"{split}.npy"),
        **digests,
    )
