"""Text to token ids, by one process or several: the ids of a document depend on nothing but the document.

Fast tokenizers travel to the worker processes as their JSON, so a worker imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy

from facility.exchange.errors import TransientError
from facility.exchange.panics import panics_refused
from facility.preparing.chat import ChatEncoder, ChatEncoding
from facility.preparing.pieces import cut_pair, encode_texts, special_tokens
from facility.preparing.sources import Document
from facility.preparing.template import Special, Template


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """Token ids of consecutive documents, one after the other."""

    tokens: numpy.ndarray
    """int32."""
    lengths: numpy.ndarray
    """Tokens of each document."""
    seconds: numpy.ndarray
    """Where the second text begins in each document (classification); else the length."""
    truncated: int = 0
    """Documents that were cut (classification)."""
    loss: numpy.ndarray | None = None
    """Chat only: uint8, 1 for each token that bears loss."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How documents become ids: everything a worker process needs."""

    backend: str | None
    """JSON of a fast tokenizer, or None: then every worker loads `directory` with transformers."""
    directory: Path
    template: Template
    specials: dict[str, int]
    """Ids of `bos` and `eos` where the template uses them."""
    wrap: bool
    """Let the tokenizer add its own special tokens ([CLS] ... [SEP]) around each document."""
    max_tokens: int | None = None
    """Classification: longer documents are cut to it (the longer text of a pair first). None: nothing is cut."""
    cut_side: Literal["left", "right"] = "right"
    """From which end a document is cut to `max_tokens`: the tokenizer's `truncation_side`."""
    chat: ChatEncoding | None = None
    """Documents are conversations."""


def encoding_of(
    tokenizer: Any,
    directory: Path,
    template: Template,
    *,
    specials: dict[str, int],
    wrap: bool,
    max_tokens: int | None,
    chat: ChatEncoding | None,
) -> Encoding:
    """How a loaded tokenizer encodes documents, as it is passed to processes that have no tokenizer object."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Encoding(
        backend=backend.to_str() if backend is not None and hasattr(backend, "to_str") else None,
        directory=directory,
        template=template,
        specials=specials,
        wrap=wrap,
        max_tokens=max_tokens,
        cut_side=getattr(tokenizer, "truncation_side", "right"),
        chat=chat,
    )


def encoder(encoding: Encoding) -> Callable[[list[Document]], EncodedBatch]:
    """A function that encodes a batch in this process."""
    if encoding.chat is not None:
        assert encoding.backend is not None, "checked before"
        return _conversations(ChatEncoder(encoding.backend, encoding.chat))
    rows = _fast_rows(encoding, encoding.backend) if encoding.backend is not None else _slow_rows(encoding)
    specials = {name: numpy.array([number], dtype=numpy.int32) for name, number in encoding.specials.items()}

    def encode(documents: list[Document]) -> EncodedBatch:
        if encoding.max_tokens is not None:
            found = rows.paired([(d.text, d.pair) for d in documents])
            ids = [numpy.array(r.ids, dtype=numpy.int32) for r in found]
            return _batch(ids, [r.second for r in found], sum(r.cut for r in found))
        filled = [encoding.template.fill(document.text) for document in documents]
        encoded = iter(rows.whole([piece for pieces in filled for piece in pieces if isinstance(piece, str)]))
        return _batch(
            [
                numpy.concatenate([specials[p.name] if isinstance(p, Special) else next(encoded) for p in pieces])
                for pieces in filled
            ]
        )

    return encode


def _conversations(encode: ChatEncoder) -> Callable[[list[Document]], EncodedBatch]:
    def encode_batch(documents: list[Document]) -> EncodedBatch:
        found = [one for document in documents for one in encode(document.text)]
        batch = _batch([one.ids for one in found])
        empty = numpy.empty(0, dtype=numpy.uint8)
        return dataclasses.replace(batch, loss=numpy.concatenate([empty, *(one.loss for one in found)]))

    return encode_batch


@dataclass(frozen=True)
class _Pair:
    ids: list[int]
    second: int
    cut: bool


@dataclass(frozen=True)
class _Rows:
    """The two ways of encoding: whole texts without their cut, or (pairs of) texts cut to a length."""

    whole: Callable[[list[str]], list[numpy.ndarray]]
    paired: Callable[[list[tuple[str, str]]], list[_Pair]]


def _fast_rows(encoding: Encoding, backend: str) -> _Rows:
    from tokenizers import Tokenizer

    fast = Tokenizer.from_str(backend)
    fast.no_padding()
    fast.no_truncation()
    fast.encode_special_tokens = True  # text that spells a special token stays text
    most, side = encoding.max_tokens, encoding.cut_side

    def whole(texts: list[str]) -> list[numpy.ndarray]:
        return encode_texts(texts, fast, wrapped=encoding.wrap)

    def paired(texts: list[tuple[str, str]]) -> list[_Pair]:
        """As the tokenizer cuts, which would also make every pair of what it cuts away from the two texts."""
        assert most is not None, "texts are cut to a length"
        around = {pair: special_tokens(fast, pair=pair) for pair in {bool(second) for _, second in texts}}
        ids = iter(encode_texts([text for pair in texts for text in pair], fast, wrapped=False))
        found = []
        for (_, text), first, second in zip(texts, ids, ids, strict=True):
            before, between, after = around[bool(text)]
            room = most - len(before) - len(between) - len(after)
            left, right = cut_pair(first, second, room, side)
            row = [*before, *left.tolist(), *between, *right.tolist(), *after]
            at = len(before) + len(left) + len(between) if len(right) else len(row)
            found.append(_Pair(row, at, len(first) + len(second) > room))
        return found

    return _Rows(whole, paired)


def _slow_rows(encoding: Encoding) -> _Rows:
    from facility.preparing.tokenizer import load_tokenizer

    slow = load_tokenizer(encoding.directory)

    def whole(texts: list[str]) -> list[numpy.ndarray]:
        found = (slow(t, add_special_tokens=encoding.wrap, split_special_tokens=True)["input_ids"] for t in texts)
        return [numpy.array(ids, dtype=numpy.int32) for ids in found]

    def paired(texts: list[tuple[str, str]]) -> list[_Pair]:
        found = []
        for first, second in texts:
            result = slow(
                first,
                second or None,
                truncation=True,
                max_length=encoding.max_tokens,
                return_token_type_ids=True,
                split_special_tokens=True,
            )
            uncut = slow(first, second or None, split_special_tokens=True)["input_ids"]
            ids = result["input_ids"]
            found.append(_Pair(ids, _first(result["token_type_ids"]), len(uncut) > len(ids)))
        return found

    return _Rows(whole, paired)


def _first(sequences: list[int | None]) -> int:
    """Position of the first token of the second text; the length where there is none."""
    return sequences.index(1) if 1 in sequences else len(sequences)


def _batch(rows: list[numpy.ndarray], seconds: list[int] | None = None, truncated: int = 0) -> EncodedBatch:
    lengths = numpy.array([len(row) for row in rows], dtype=numpy.int64)
    return EncodedBatch(
        tokens=numpy.concatenate(rows) if rows else numpy.empty(0, dtype=numpy.int32),
        lengths=lengths,
        seconds=lengths if seconds is None else numpy.array(seconds, dtype=numpy.int64),
        truncated=truncated,
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive documents of one split."""

    split: str
    documents: list[Document]


def encode_all(batches: Iterable[Batch], encoding: Encoding, *, processes: int) -> Iterator[tuple[Batch, EncodedBatch]]:
    """Encode batches in their order on `processes` processes, with at most three batches a process under way."""
    if processes <= 1:
        encode = encoder(encoding)
        for batch in batches:
            yield batch, encode(batch.documents)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(encoding,)) as pool:
        waiting: deque[tuple[Batch, Future[EncodedBatch]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_work, batch.documents)))
                if len(waiting) >= 3 * processes:
                    first, result = waiting.popleft()
                    yield first, result.result()
            while waiting:
                first, result = waiting.popleft()
                yield first, result.result()
        except BrokenProcessPool:
            raise TransientError(
                f"one of {processes} tokenising processes died (killed for memory?): try fewer processes"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encode: Callable[[list[Document]], EncodedBatch] | None = None


def _start(encoding: Encoding) -> None:
    global _encode
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encode = encoder(encoding)


def _end_with_parent() -> None:
    """End this process with the one that started it; after SIGKILL of that it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(documents: list[Document]) -> EncodedBatch:
    assert _encode is not None
    with panics_refused("the tokenizer"):
        return _encode(documents)
