"""One request to prepare a dataset, checked, recognised if it was done before, or carried out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.dataset import (
    NAME,
    SPLITS,
    TOKENIZER,
    DatasetError,
    DatasetManifest,
    Documents,
    PreparedDataset,
    SourceEntry,
    Task,
    open_dataset,
)
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import sha256_of
from facility.preparing.chat import ChatEncoding, chat_encoding
from facility.preparing.chat_template import Loss
from facility.preparing.encoding import Encoding, encoding_of
from facility.preparing.mixing import input_shares
from facility.preparing.output import (
    AnyRequest,
    Prepared,
    check_apart,
    check_out,
    clear_after_kill,
    finish_replacement,
    in_few,
    publish_directory,
    recognise_dataset,
)
from facility.preparing.overlap import check_overlap
from facility.preparing.reading import Progress, Reading
from facility.preparing.resuming import part_of
from facility.preparing.shared_signatures import read_salt, read_signatures, write_signatures
from facility.preparing.sources import Fields, Source, find_sources
from facility.preparing.template import Template, parse_template
from facility.preparing.tokenizer import (
    copy_tokenizer,
    encode_differently,
    file_digests,
    ids_of,
    length_limit,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)
from facility.preparing.writing import write_splits

DEFAULT_TEMPLATE: dict[Task, str] = {
    "causal-lm": "{text}{eos}",
    "chat": "{text}",
    "preference": "{text}",
    "masked-lm": "{text}",
    "classification": "{text}",
}
LANGUAGES = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*(, ?[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*){0,15}")
log = logging.getLogger(__name__)
HOW = 2
"""Raised when the same request makes another dataset than before: what was begun otherwise is not gone on with."""
LIBRARIES = ("tokenizers", "transformers", "datasets", "numpy")


@dataclass(frozen=True, kw_only=True)
class Request(AnyRequest):
    """What `python -m facility.prepare` was asked for."""

    tokenizer: Path
    """Directory of the tokenizer."""
    block_tokens: int
    """Tokens per block."""
    task: Task = "causal-lm"
    template: str | None = None
    """None: the task's own."""
    chat_template: str | None = None
    """Chat: a file with a Jinja template, or `none` for plain prompts and completions; None: the tokenizer's own."""
    loss: Loss = "all-turns"
    """Chat: which answers bear loss."""
    documents: Documents | None = None
    """How documents share a block; None: separate for chat, else joined."""
    fields: Fields = dataclasses.field(default_factory=Fields)
    near_duplicates: float = 0.0
    """Leave out documents whose similarity to an earlier one is this or more, in (0, 1]; 0: none is."""
    salt: Path | None = None
    """A secret shared with other facilities, which keys signatures that are exchanged."""
    share_signatures: Path | None = None
    """Write the kept documents' signatures to this file, for another facility."""
    drop_signatures: list[Path] = dataclasses.field(default_factory=list)
    """Other facilities' signatures: leave out the documents that they hold already."""
    language: str = ""
    """What the facility says its text is in, as BCP 47 tags such as `it` or `it, en`; recorded, not looked for."""
    weights: list[float] = dataclasses.field(default_factory=list)
    """Weight of each of `inputs`; empty: each is read whole, or as `temperature` says."""
    temperature: float = 1.0
    """Above 1: less is read of large inputs, so that small ones weigh more."""
    split: str = "train"
    """Split of a saved or hub dataset that is read for training."""
    validation_split: str = "validation"
    """Split of a saved or hub dataset that is read for validation."""
    model: Path | None = None
    """A model's directory, whose `config.json` bounds the block and the vocabulary."""

    def __post_init__(self) -> None:
        self._check(block_tokens=1)
        if not 0 <= self.near_duplicates <= 1:
            raise DatasetError(
                f"near_duplicates is {self.near_duplicates}, expected more than 0 and at most 1; 0 is off"
            )
        self._check_signatures()
        if self.language and not LANGUAGES.fullmatch(self.language):
            raise DatasetError(f"language is {self.language!r}, expected BCP 47 tags such as 'it' or 'it, pt-BR'")
        input_shares([1] * len(self.inputs), weights=self.weights, temperature=self.temperature)
        if (self.task == "classification") != (self.fields.label is not None):
            raise DatasetError(f"a label field is given for classification and only there; the task is {self.task}")
        if self.classes and self.task != "classification":
            raise DatasetError(f"classes are named for classification only; the task is {self.task}")
        if self.fields.pair is not None and self.task != "classification":
            raise DatasetError(f"a second text is for classification only; the task is {self.task}")
        if self.task == "classification" and self.template not in (None, "{text}"):
            raise DatasetError("classification takes no template: the tokenizer joins the texts")
        chat = self.task in ("chat", "preference")
        if chat != self.fields.chat:
            raise DatasetError(f"conversations are read for chat and only there; the task is {self.task}")
        if chat and self.template is not None:
            raise DatasetError("chat takes no --template: give --chat-template, a Jinja file")
        if not chat and (self.chat_template is not None or self.loss != "all-turns"):
            raise DatasetError(f"a chat template and a choice of turns are for chat only; the task is {self.task}")
        if self.fields.pairs != (self.task == "preference"):
            raise DatasetError(f"pairs of answers are read for preference and only there; the task is {self.task}")
        if self.task == "preference" and self.loss != "all-turns":
            raise DatasetError("a choice of turns is for chat only: what follows the prompt is the answer")
        allowed = {
            "chat": ("separate", "joined", "padded"),
            "preference": ("separate",),
            "causal-lm": ("joined", "separate"),
        }
        if self.sharing not in allowed.get(self.task, ("joined",)):
            raise DatasetError(f"documents cannot be {self.sharing!r} for the task {self.task}")

    def _check_signatures(self) -> None:
        exchanged = self.share_signatures is not None or bool(self.drop_signatures)
        if exchanged != (self.salt is not None):
            raise DatasetError(
                "signatures are exchanged with a salt that both facilities hold: --signature-salt belongs to "
                "--share-signatures and --drop-signatures, and they to it"
            )
        if exchanged and not 0 < self.near_duplicates < 1:
            raise DatasetError(
                f"near_duplicates is {self.near_duplicates} and signatures are exchanged: expected the similarity from "
                "which on documents count as equal, above 0 and below 1, such as 0.8"
            )
        if (shared := self.share_signatures) is not None and (shared.is_dir() or not shared.parent.is_dir()):
            raise DatasetError(f"--share-signatures is {shared}: expected a file, in a directory that is there")

    @property
    def sharing(self) -> Documents:
        """How documents share a block."""
        return self.documents or ("separate" if self.task in ("chat", "preference") else "joined")

    @property
    def apart(self) -> bool:
        """True if no document shares its context with another."""
        return self.sharing != "joined" or self.task == "classification"


def prepare_dataset(request: Request, *, progress: Progress | None = None) -> Prepared:
    """Make the dataset, or recognise it.

    `progress(source, share, documents)` is called as documents are read: share of all sources in [0, 1]. Nothing is
    left behind on an error. Raises `DatasetError`; `TransientError` when a worker process dies.
    """
    check_out(request.out, [*request.inputs, *request.validation])
    template = parse_template(request.template if request.template is not None else DEFAULT_TEMPLATE[request.task])
    sources, entries = _found(request)
    wanted: dict[str, Any] = {
        "task": request.task,
        "block_tokens": request.block_tokens,
        "tokenizer_sha256": tokenizer_sha256(request.tokenizer),
        "template": template.source,
        "documents": request.sharing,
        "settings": _settings(request),
        "language": request.language,
        "sources": entries,
    }
    tokenizer = None
    chat = None
    if request.fields.chat:
        tokenizer = load_tokenizer(request.tokenizer)
        chat = chat_encoding(tokenizer, request.tokenizer, request.chat_template, request.loss)
        wanted |= {"template": "", "chat_template_sha256": chat.template.sha256}
    if (found := _there(request, wanted)) is not None:
        clear_after_kill(request.out)
        return found
    tokenizer = tokenizer or load_tokenizer(request.tokenizer)
    encoding = _checked_encoding(request, template, tokenizer, chat)
    known = all(entry.sha256 for entry in entries)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    made_by = [file_digests(request.tokenizer), versions, HOW]
    with part_of(request.out, wanted | {"made by": made_by}, known=known) as part:
        finish_replacement(request.out)
        if (found := _there(request, wanted)) is not None:  # made meanwhile, by a process that ended
            return found
        documents = Reading(request, sources, progress or (lambda *_: None), part.directory)
        with closing(documents) as reading, publish_directory(request.out) as directory:
            parts = write_splits(request, reading, tokenizer, encoding, part)
            part.deliver(directory)
            copy_tokenizer(request.tokenizer, directory / TOKENIZER)
            if chat is not None and request.chat_template is not None and chat.template.source:
                (directory / TOKENIZER / "chat_template.jinja").write_text(chat.template.source, encoding="utf-8")
            manifest = DatasetManifest(**wanted, vocabulary_size=ids_of(tokenizer), **parts, versions=versions)
            write_json(directory / NAME, dataclasses.asdict(manifest))
            _share(request, reading)
    return Prepared(dataset=open_dataset(request.out), reused=False)


def _there(request: Request, wanted: dict[str, Any]) -> Prepared | None:
    """The dataset at `out`, where the same request made it. Raises `DatasetError` where another one did."""
    found = recognise_dataset(
        request, wanted, lambda dataset: _other_tokenizer(request, dataset) + _older(request, dataset)
    )
    if found is None:
        return None
    if not request.allow_overlap:
        check_overlap(found.manifest.splits["validation"])
    if request.share_signatures is not None and request.salt is not None:
        again = "--replace makes both again"
        if not request.share_signatures.is_file():
            raise DatasetError(
                f"{request.out} was prepared before, and {request.share_signatures} is not there: {again}"
            )
        try:
            read_signatures(request.share_signatures, read_salt(request.salt))
        except DatasetError as error:
            raise DatasetError(f"{request.out} was prepared before, and {error}; {again}") from None
    return Prepared(dataset=found, reused=True)


def _other_tokenizer(request: Request, found: PreparedDataset) -> list[str]:
    """What of a tokenizer differs that its digest does not cover; [] where nothing does."""
    if found.manifest.tokenizer_sha256 != tokenizer_sha256(request.tokenizer):
        return []  # named already
    return ["tokenizer, its special tokens or how it cuts text"] * encode_differently(
        request.tokenizer, found.tokenizer_directory
    )


def _older(request: Request, found: PreparedDataset) -> list[str]:
    """What a dataset of an earlier version lacks, where it may be replaced; [] where nothing, or where it serves."""
    return ["marks of documents' rests"] * (request.replace and found.hides_rests)


def _found(request: Request) -> tuple[dict[str, list[Source]], list[SourceEntry]]:
    """The sources of each split, and what the manifest says of all. Raises `DatasetError` for a source in both."""
    sources = {
        "train": find_sources(request.inputs, split=request.split, streaming=request.streaming),
        "validation": find_sources(request.validation, split=request.validation_split, streaming=request.streaming),
    }
    entries = [_entry(source, split) for split in SPLITS for source in sources[split]]
    # An empty file is not text, and of a dataset that is streamed nothing is known: their documents are compared.
    check_apart([entry for entry in entries if entry.size and entry.sha256])
    given = {"train": request.inputs, "validation": request.validation}
    return sources, [one for split in SPLITS for one in in_few(given[split], split, sources[split], entries)]


def _share(request: Request, reading: Reading) -> None:
    """Write the signatures that another facility was promised."""
    if request.share_signatures is not None and request.salt is not None and reading.earlier is not None:
        write_signatures(request.share_signatures, reading.earlier.own(), read_salt(request.salt))


def _entry(source: Source, split: str) -> SourceEntry:
    if source.path is not None:
        return SourceEntry(
            name=source.name, split=split, sha256=sha256_of(source.path), size=source.path.stat().st_size
        )
    rows = len(source.dataset) if hasattr(source.dataset, "__len__") else 0
    return SourceEntry(name=source.name, split=split, sha256=getattr(source.dataset, "_fingerprint", ""), size=rows)


def _settings(request: Request) -> dict[str, Any]:
    """What decides the result beside what the manifest has fields for."""
    return (
        {
            "text_field": request.fields.text,
            "pair_field": request.fields.pair,
            "label_field": request.fields.label,
            "text_unit": request.fields.unit,
            "validation_share": None if request.validation else request.validation_share,
            "train_samples": request.train_samples,
            "validation_samples": request.validation_samples,
        }
        | ({"loss": request.loss} if request.task == "chat" else {})
        | _care(request)
    )


def _care(request: Request) -> dict[str, Any]:
    """Settings that choose among the documents, where they are used: datasets made before them stay recognised."""
    used = {
        "classes": list(request.classes),
        "near_duplicates": request.near_duplicates,
        "dropped_signatures": [sha256_of(path) for path in request.drop_signatures],
        "weights": list(request.weights),
        "temperature": request.temperature if request.temperature != 1 else 0,
    }
    return {name: value for name, value in used.items() if value}


def _check_length(request: Request, tokenizer: Any) -> None:
    """Raise `DatasetError` for blocks in which nothing could be predicted, or no text has room."""
    least = {"causal-lm": 2, "chat": 2, "preference": 4}.get(request.task, 1)
    if request.task == "classification":
        least = 1 + int(tokenizer.num_special_tokens_to_add(pair=request.fields.pair is not None))
    if request.block_tokens < least:
        raise DatasetError(f"block_tokens is {request.block_tokens}, expected {least} or more for {request.task}")


def begins_texts(tokenizer: Any) -> bool:
    """True if the tokenizer puts its bos token before a text, where it is asked for its own special tokens."""
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("a")["input_ids"][:1] == [begin]


def _checked_encoding(request: Request, template: Template, tokenizer: Any, chat: ChatEncoding | None) -> Encoding:
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
    if request.task == "causal-lm" and "bos" not in template.specials and begins_texts(tokenizer):
        log.warning(
            "the tokenizer in %s begins a text with %s, as lm-eval and TRL then do, and the template %r does not: give "
            "--template '{bos}%s' unless documents are to begin without it",
            request.tokenizer,
            tokenizer.bos_token,
            template.source,
            template.source,
        )
    _check_length(request, tokenizer)
    directories = [request.tokenizer, *([request.model] if request.model is not None else [])]
    limit = length_limit(tokenizer, *directories)
    if limit is not None and request.block_tokens > limit[0]:
        raise DatasetError(
            f"blocks of {request.block_tokens} tokens are longer than the limit of {limit[0]} ({limit[1]})"
        )
    if request.model is not None and (size := vocabulary_size(request.model)) is not None and ids_of(tokenizer) > size:
        raise DatasetError(
            f"the tokenizer in {request.tokenizer} has {ids_of(tokenizer)} ids, the model in {request.model} {size}: "
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
        chat=chat,
    )
