"""One request to prepare a dataset, checked, recognised if it was done before, or carried out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.dataset import (
    NAME,
    SPLITS,
    TOKENIZER,
    DatasetError,
    DatasetManifest,
    PreparedDataset,
    SourceEntry,
    SplitEntry,
    Task,
    open_dataset,
)
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.messages.manifest import sha256_of
from facility.preparing.encoding import Batch, Encoding, encode_all, encoding_of
from facility.preparing.overlap import ContentDigests, check_overlap
from facility.preparing.packing import Packer
from facility.preparing.rows import LabelledRows, class_names, pad_token_id
from facility.preparing.sources import Document, Fields, Source, find_sources, read
from facility.preparing.template import Template, parse_template
from facility.preparing.tokenizer import copy_tokenizer, length_limit, load_tokenizer, tokenizer_sha256, vocabulary_size

BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 2_000_000
DEFAULT_TEMPLATE: dict[Task, str] = {"causal-lm": "{text}{eos}", "masked-lm": "{text}", "classification": "{text}"}
Progress = Callable[[str, float, int], None]
LIBRARIES = ("tokenizers", "transformers", "datasets", "numpy")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `python -m facility.prepare` was asked for."""

    inputs: list[str]
    """Files, folders, saved datasets or hub names for training."""
    tokenizer: Path
    """Directory of the tokenizer."""
    out: Path
    """Directory to make."""
    block_tokens: int
    """Tokens per block."""
    task: Task = "causal-lm"
    template: str | None = None
    """None: the task's own."""
    fields: Fields = dataclasses.field(default_factory=Fields)
    validation: list[str] = dataclasses.field(default_factory=list)
    """Inputs of the validation split; empty: a share of the training inputs."""
    validation_share: float = 0.05
    """Share of the documents that is held out, evenly spread, where `validation` is empty."""
    train_samples: int = 0
    """At most so many documents; 0: all."""
    validation_samples: int = 0
    """At most so many documents; 0: all."""
    split: str = "train"
    """Split of a saved or hub dataset that is read for training."""
    validation_split: str = "validation"
    """Split of a saved or hub dataset that is read for validation."""
    streaming: bool = False
    """Read hub datasets as they download, keeping nothing."""
    model: Path | None = None
    """A model's directory, whose `config.json` bounds the block and the vocabulary."""
    processes: int = 1
    replace: bool = False
    """Make `out` again when it holds a dataset made otherwise."""
    allow_overlap: bool = False
    """Accept any number of validation documents that are in training too."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("block_tokens", self.block_tokens, 1),
            ("train_samples", self.train_samples, 0),
            ("validation_samples", self.validation_samples, 0),
            ("processes", self.processes, 1),
        ):
            if value < least:
                raise DatasetError(f"{name} is {value}, expected {least} or more")
        if not 0 < self.validation_share < 1:
            raise DatasetError(f"validation_share is {self.validation_share}, expected more than 0 and less than 1")
        if (self.task == "classification") != (self.fields.label is not None):
            raise DatasetError(f"a label field is given for classification and only there; the task is {self.task}")
        if self.fields.pair is not None and self.task != "classification":
            raise DatasetError(f"a second text is for classification only; the task is {self.task}")
        if self.task == "classification" and self.template not in (None, "{text}"):
            raise DatasetError("classification takes no template: the tokenizer joins the texts")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A dataset and whether it was there already."""

    dataset: PreparedDataset
    reused: bool


def prepare(request: Request, *, progress: Progress | None = None) -> Prepared:
    """Make the dataset, or recognise it.

    `progress(source, share, documents)` is called as documents are read: share of all sources in [0, 1]. Nothing is
    left behind on an error. Raises `DatasetError`; `TryAgain` when a worker process dies.
    """
    template = parse_template(request.template if request.template is not None else DEFAULT_TEMPLATE[request.task])
    sources = {
        "train": find_sources(request.inputs, split=request.split, streaming=request.streaming),
        "validation": find_sources(request.validation, split=request.validation_split, streaming=request.streaming),
    }
    entries = [_entry(source, split) for split in SPLITS for source in sources[split]]
    both = {e.sha256 for e in entries if e.split == "train"} & {e.sha256 for e in entries if e.split == "validation"}
    if both:
        names = sorted({entry.name for entry in entries if entry.sha256 in both})
        raise DatasetError(f"{', '.join(names)}: the same content is given for training and for validation")
    wanted: dict[str, Any] = {
        "task": request.task,
        "block_tokens": request.block_tokens,
        "tokenizer_sha256": tokenizer_sha256(request.tokenizer),
        "template": template.source,
        "settings": _settings(request),
        "sources": entries,
    }
    if request.out.exists() and any(request.out.iterdir() if request.out.is_dir() else [request.out]):
        found = _recognised(request, wanted)
        if found is not None:
            if not request.allow_overlap:
                check_overlap(found.manifest.splits["validation"])
            return Prepared(dataset=found, reused=True)
    tokenizer = load_tokenizer(request.tokenizer)
    encoding = _checked_encoding(request, template, tokenizer)
    with _published(request.out) as directory:
        parts = _write(request, sources, tokenizer, encoding, directory, progress or (lambda *_: None))
        copy_tokenizer(request.tokenizer, directory / TOKENIZER)
        manifest = DatasetManifest(
            **wanted,
            vocabulary_size=len(tokenizer),
            **parts,
            versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        )
        write_json(directory / NAME, dataclasses.asdict(manifest))
    return Prepared(dataset=open_dataset(request.out), reused=False)


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A temporary directory that becomes `out` at the end; an `out` that exists is there, whole, until that moment."""
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if not out.exists():
        with new_directory(out) as directory:
            yield directory
        return
    newer, older = (out.with_name(f".{out.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    with new_directory(newer) as directory:
        yield directory
    os.rename(out, older)
    os.rename(newer, out)
    shutil.rmtree(older)


def _entry(source: Source, split: str) -> SourceEntry:
    if source.path is not None:
        return SourceEntry(
            name=source.name, split=split, sha256=sha256_of(source.path), size=source.path.stat().st_size
        )
    rows = len(source.dataset) if hasattr(source.dataset, "__len__") else 0
    return SourceEntry(name=source.name, split=split, sha256=getattr(source.dataset, "_fingerprint", ""), size=rows)


def _settings(request: Request) -> dict[str, Any]:
    """What decides the result beside what the manifest has fields for."""
    return {
        "text_field": request.fields.text,
        "pair_field": request.fields.pair,
        "label_field": request.fields.label,
        "text_unit": request.fields.unit,
        "validation_share": None if request.validation else request.validation_share,
        "train_samples": request.train_samples,
        "validation_samples": request.validation_samples,
    }


def _recognised(request: Request, wanted: dict[str, Any]) -> PreparedDataset | None:
    """The dataset at `out` if the same request made it; None if replaceable; else an error naming the differences."""
    if not (request.out / NAME).is_file():
        raise DatasetError(f"{request.out} exists and is no prepared dataset: choose another --out")
    try:
        found = open_dataset(request.out)
    except DatasetError as error:
        if request.replace:
            return None
        raise DatasetError(f"{error}; --replace makes it again") from None
    # A streamed dataset has no fingerprint that says what it holds: it is never recognised.
    differing = [name for name, value in wanted.items() if getattr(found.manifest, name) != value]
    if request.streaming and any(not entry.size for entry in wanted["sources"]):
        differing.append("sources (streamed: not known until they are read)")
    if not differing:
        return found
    if request.replace:
        return None
    raise DatasetError(
        f"{request.out} holds a dataset prepared otherwise (differing: {', '.join(differing)}); --replace makes it "
        "again"
    )


def _checked_encoding(request: Request, template: Template, tokenizer: Any) -> Encoding:
    """Check the request against the tokenizer and the model, and settle how text is encoded."""
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    if request.task == "masked-lm" and ids["eos"] is None:
        ids["eos"] = tokenizer.sep_token_id
    for name in template.specials:
        if ids[name] is None:
            raise DatasetError(
                f"template {template.source!r} uses {{{name}}}, but the tokenizer in {request.tokenizer} has no {name} "
                f"token: give a --template without {{{name}}}, or set the token in tokenizer_config.json"
            )
    directories = [request.tokenizer, *([request.model] if request.model is not None else [])]
    limit = length_limit(tokenizer, *directories)
    if limit is not None and request.block_tokens > limit[0]:
        raise DatasetError(
            f"blocks of {request.block_tokens} tokens are longer than the limit of {limit[0]} ({limit[1]})"
        )
    if request.model is not None and (size := vocabulary_size(request.model)) is not None and len(tokenizer) > size:
        raise DatasetError(
            f"the tokenizer in {request.tokenizer} has {len(tokenizer)} tokens, the model in {request.model} {size}: "
            "they do not belong together"
        )
    classification = request.task == "classification"
    return encoding_of(
        tokenizer,
        request.tokenizer,
        template,
        specials={name: ids[name] for name in template.specials},
        wrap=classification or (request.task == "masked-lm" and not template.specials),
        max_tokens=request.block_tokens if classification else None,
    )


class _Reading:
    """The documents of all sources as batches of one split each, up to the caps; counts as it goes."""

    def __init__(self, request: Request, sources: dict[str, list[Source]], progress: Progress) -> None:
        self.request, self.sources, self.progress = request, sources, progress
        self.documents = dict.fromkeys(SPLITS, 0)
        self.empty = dict.fromkeys(SPLITS, 0)
        self.digests = ContentDigests()

    def batches(self) -> Iterator[Batch]:
        held: dict[str, list[Document]] = {split: [] for split in SPLITS}
        characters = dict.fromkeys(SPLITS, 0)
        for split, document in self._assigned():
            held[split].append(document)
            characters[split] += len(document.text) + len(document.pair)
            if len(held[split]) >= BATCH_DOCUMENTS or characters[split] >= BATCH_CHARACTERS:
                yield self._batch(split, held[split])
                held[split], characters[split] = [], 0
        for split in SPLITS:
            if held[split]:
                yield self._batch(split, held[split])

    def _batch(self, split: str, documents: list[Document]) -> Batch:
        self.digests.add(split, documents)
        return Batch(split=split, documents=documents)

    def _assigned(self) -> Iterator[tuple[str, Document]]:
        caps = {"train": self.request.train_samples, "validation": self.request.validation_samples}
        pending = [(split, source) for split in SPLITS for source in self.sources[split]]
        shared = not self.request.validation
        seen = 0
        for number, (origin, source) in enumerate(pending):
            for document in read(source, self.request.fields):
                self.progress(source.name, (number + document.done) / len(pending), seen)
                split = origin
                if shared and self._held_out(seen):
                    split = "validation"
                if not document.text.strip():
                    self.empty[split] += 1
                    continue
                seen += 1
                full = [name for name, cap in caps.items() if cap and self.documents[name] >= cap]
                if self._enough(origin, full, shared):
                    break
                if split not in full:
                    self.documents[split] += 1
                    yield split, document
        self.progress("", 1.0, seen)

    def _enough(self, origin: str, full: list[str], shared: bool) -> bool:
        """Whether reading on would add nothing that was asked for."""
        if not shared:
            return origin in full
        return "train" in full and ("validation" in full or not self.request.validation_samples)

    def _held_out(self, index: int) -> bool:
        """Whether document `index` is among the evenly spread share for validation."""
        share = self.request.validation_share
        return math.floor((index + 1) * share) > math.floor(index * share)


def _write(
    request: Request,
    sources: dict[str, list[Source]],
    tokenizer: Any,
    encoding: Encoding,
    directory: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Write the arrays of both splits; returns the manifest's fields that only now are known."""
    reading = _Reading(request, sources, progress)
    labelled = request.task == "classification"
    pad = pad_token_id(tokenizer, request.tokenizer) if labelled else None
    writers: dict[str, Packer | LabelledRows] = {
        split: LabelledRows(directory, split, request.block_tokens, pad)
        if pad is not None
        else Packer(directory / f"{split}.npy", request.block_tokens)
        for split in SPLITS
    }
    for batch, encoded in encode_all(reading.batches(), encoding, processes=request.processes):
        writers[batch.split].append(encoded, batch.documents)
    classes = class_names([w.labels for w in writers.values() if isinstance(w, LabelledRows)]) if labelled else []
    splits = {}
    for split, writer in writers.items():
        if isinstance(writer, LabelledRows):
            writer.close(classes)
        else:
            writer.close()
        documents = reading.documents[split]
        if not writer.blocks:
            hint = "give more text" if split == "train" else "give more text, or a larger --validation-share"
            raise DatasetError(
                f"{split}: {documents} documents gave {writer.tokens} tokens, not one block of {request.block_tokens}; "
                f"{hint}, or a smaller --block-tokens"
            )
        splits[split] = SplitEntry(
            blocks=writer.blocks,
            documents=documents,
            empty_documents=reading.empty[split],
            tokens=writer.tokens,
            tail_tokens=writer.tail_tokens,
            truncated_documents=writer.truncated if isinstance(writer, LabelledRows) else 0,
            overlapping_documents=reading.digests.overlapping() if split == "validation" else 0,
            sha256=sha256_of(directory / f"{split}.npy"),
            rows_sha256=sha256_of(directory / f"{split}.rows.npy") if labelled else None,
        )
    if not request.allow_overlap:
        check_overlap(splits["validation"])
    return {"classes": classes, "pad_token_id": pad, "splits": splits}
