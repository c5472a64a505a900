"""From encoded documents to the arrays of a dataset directory, and what its manifest says of them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from facility.dataset import SPLITS, DatasetError, Documents, SplitEntry
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.task_words import Task
from facility.exchange.text import number_of
from facility.preparing.encoding import EncodedBatch, Encoding, encode_all
from facility.preparing.marked import MarkedStream, WholeDocuments
from facility.preparing.overlap import check_overlap
from facility.preparing.packing import Packer
from facility.preparing.pairs import AnswerPairs
from facility.preparing.reading import Reading
from facility.preparing.resuming import Part
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
    @property
    def classes(self) -> list[str]: ...


class Writer(Protocol):
    """Writes the blocks of one split and counts."""

    tokens: int

    @property
    def blocks(self) -> int: ...
    @property
    def tail_tokens(self) -> int: ...
    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None: ...
    def close(self) -> None: ...


def writer_of(request: Wanted, tokenizer: Any, directory: Path, split: str, state: dict[str, Any] | None) -> Any:
    """The writer that task and sharing ask for; `state`: of the writer of an earlier run, which goes on."""
    if request.task == "classification":
        return LabelledRows(directory, split, request.block_tokens, pad_token_id(tokenizer, request.tokenizer))
    if request.task == "preference":
        filler = pad_token_id(tokenizer, request.tokenizer)
        return AnswerPairs(directory, split, request.block_tokens, filler=filler)
    if request.sharing in ("separate", "padded") and request.task == "chat":
        filler, alone = pad_token_id(tokenizer, request.tokenizer), request.sharing == "padded"
        return WholeDocuments(directory, split, request.block_tokens, filler=filler, alone=alone, state=state)
    if request.task == "chat" or request.sharing == "separate":
        end = filler_of(tokenizer) if request.sharing == "separate" else None
        return MarkedStream(directory, split, request.block_tokens, filler=end, state=state)
    return Packer(directory / f"{split}.npy", request.block_tokens, state)


def filler_of(tokenizer: Any) -> int:
    """The id after the last document of a stream; no token sees it, and it bears no loss, so that any will do."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(value for value in ids if value is not None))


def write_splits(request: Wanted, reading: Reading, tokenizer: Any, encoding: Encoding, part: Part) -> dict[str, Any]:
    """Write the arrays of both splits to the part's directory; returns the manifest's fields that only now are known.

    What an earlier run wrote is read again, not encoded again.
    """
    directory, done = part.directory, part.batches
    writers = {split: writer_of(request, tokenizer, directory, split, part.writers[split]) for split in SPLITS}
    left = itertools.islice(reading.batches(), done, None)
    for number, (batch, encoded) in enumerate(encode_all(left, encoding, processes=request.processes), start=done + 1):
        writers[batch.split].append(encoded, batch.documents)
        part.lengths[batch.split].update(encoded.lengths.tolist())
        part.save(writers, number)
    labelled = request.task == "classification"
    classes = (
        class_names([one.labels for one in writers.values()], request.classes, reading.declared) if labelled else []
    )
    splits = {}
    for split, writer in writers.items():
        writer.close(*([classes] if labelled else []))
        check_blocks(writer, split, reading.documents[split], request.block_tokens)
        splits[split] = entry_of(writer, split, reading, directory, part.lengths[split])
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
    reason = getattr(writer, "why_dropped", "bear no loss")
    why = f" ({dropped} of them {reason} within {block_tokens} tokens)" if dropped else ""
    raise DatasetError(
        f"{split}: {number_of(documents, 'document')}{why} gave {number_of(writer.tokens, 'token')}, not one block of "
        f"{block_tokens}; "
        f"{hint}, or {'a larger' if dropped else 'a smaller'} --block-tokens"
    )


def quantiles(lengths: Mapping[int, int]) -> list[int]:
    """Least, median, 95th percentile and most, each a length that occurs. `lengths`: how often each does."""
    ordered = sorted(lengths)
    ends = list(itertools.accumulate(lengths[one] for one in ordered))
    places = [round(share * (ends[-1] - 1)) for share in (0.0, 0.5, 0.95, 1.0)] if ends else []
    return [ordered[bisect.bisect_right(ends, place)] for place in places]


def entry_of(writer: Any, split: str, reading: Reading, directory: Path, lengths: Mapping[int, int]) -> SplitEntry:
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
        rests_marked=getattr(writer, "rests_marked", False),
        duplicate_documents=reading.duplicates[split],
        elsewhere_documents=reading.elsewhere[split],
        document_tokens=quantiles(lengths),
        overlapping_documents=reading.digests.overlapping() if split == "validation" else 0,
        sha256=sha256_of(directory / f"{split}.npy"),
        **digests,
    )
