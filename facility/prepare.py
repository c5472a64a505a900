"""`python -m facility.prepare`: text or images to a prepared dataset, once per facility and corpus.

    python -m facility.prepare --input train.jsonl --validation validation.jsonl --tokenizer tokenizer/ \\
        --out prepared/it --block-tokens 512 --template "Scrivi un documento: {text}{eos}"

    python -m facility.prepare --task image-classification --input images/train --validation images/validation \\
        --model models/vit --out prepared/images

The same command again recognises its own result and does nothing. The output depends on the inputs and the settings,
not on the number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from facility.dataset import IMAGES, PreparedDataset
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import exit_on_error
from facility.exchange.logs import add_log_options
from facility.exchange.panics import panics_refused
from facility.exchange.text import number_of
from facility.preparing.fitting_options import check_options
from facility.preparing.images.command import add_images, prepare_images_of, summary_of_images
from facility.preparing.said_of_records import summary_of_classes
from facility.preparing.sources import unicode_name

LINE_SECONDS = 30.0
"""Between two lines of progress in a log."""

if TYPE_CHECKING:
    from facility.preparing.output import Prepared


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m facility.prepare",
        description="Tokenise text and pack it into blocks of equal length, or decode images and bring them to one "
        "size: DIR/train.npy, DIR/validation.npy, DIR/tokenizer/ (or DIR/image_processor/) and DIR/dataset.json.",
    )
    add_paths(arguments)
    add_documents(arguments)
    add_images(arguments)
    add_reading(arguments)
    add_choice(arguments)
    add_running(arguments)
    return arguments


def add_paths(arguments: argparse.ArgumentParser) -> None:
    """What is read, by which tokenizer, and where the blocks go."""
    add = arguments.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        dest="inputs",
        help="training text: JSONL, text, Parquet or Arrow files (also .gz, .bz2, .xz, .zst of the first two), folders "
        "of them, a save_to_disk dataset, or a dataset of the hub (hub:NAME, hub:NAME:CONFIGURATION or ORG/NAME); "
        "training images: folders whose folders are the classes, folders with metadata.csv or metadata.jsonl, or "
        "Parquet files of images",
    )
    held_out = arguments.add_mutually_exclusive_group()
    held_out.add_argument("--validation", nargs="+", default=[], metavar="PATH", help="validation text, as --input")
    held_out.add_argument(
        "--validation-share",
        type=float,
        default=0.05,
        metavar="X",
        help="without --validation: hold out this share of the documents: evenly spread, or, of documents that are "
        "kept apart and of labelled ones, about this share, chosen by each one's content (default 0.05)",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="directory of the tokenizer (text)")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="a model's directory: check blocks and tokenizer against its config.json; images: whose image processor "
        "is used",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="directory to make; it appears when it is complete")
    add(
        "--block-tokens",
        type=int,
        metavar="N",
        help="tokens per block (text; classification: longest document)",
    )


def add_documents(arguments: argparse.ArgumentParser) -> None:
    """What a document is, and how documents become blocks."""
    add = arguments.add_argument
    add(
        "--task",
        choices=("causal-lm", "chat", "preference", "masked-lm", "classification", IMAGES),
        default="causal-lm",
        help="default causal-lm",
    )
    add(
        "--template",
        help='what surrounds each text, e.g. "Scrivi un documento: {text}{eos}"; names are {text}, {bos}, '
        "{eos} (default {text}{eos}; {text} for masked-lm, where the tokenizer adds its own)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="chat: a Jinja template (default: the tokenizer's own); `none`: prompt and completion as plain texts",
    )
    add(
        "--loss",
        choices=("all-turns", "last-turn"),
        default="all-turns",
        help="chat: which answers bear loss (default all-turns)",
    )
    add(
        "--documents",
        choices=("joined", "separate", "padded"),
        help="how documents share a block: joined, one text; separate, each attends to itself only and positions begin "
        "anew; padded, one a block (default: separate for chat, else joined)",
    )
    add("--text-field", default="text", metavar="NAME", help="field that holds the text (default text)")
    add("--pair-field", metavar="NAME", help="classification: field of the second text")
    add("--label-field", metavar="NAME", help="classification, images: field of the label (default label)")
    add(
        "--text-unit",
        choices=("line", "paragraph", "file"),
        default="line",
        help="what a document is in a plain-text file (default line; paragraphs are parted by empty lines)",
    )


def add_reading(arguments: argparse.ArgumentParser) -> None:
    """How much is read, and from where."""
    add = arguments.add_argument
    add("--split", default="train", metavar="NAME", help="split of a saved or hub dataset for training (default train)")
    add(
        "--validation-split",
        default="validation",
        metavar="NAME",
        help="the same for --validation (default validation)",
    )
    add("--train-samples", type=int, default=0, metavar="N", help="at most N training documents (default 0: all)")
    add(
        "--validation-samples", type=int, default=0, metavar="N", help="at most N validation documents (default 0: all)"
    )
    add(
        "--processes", type=int, default=1, metavar="N", help="tokenising processes (default 1); the output is the same"
    )
    add(
        "--offline",
        action="store_true",
        help="never ask the hub: only what its cache on this machine holds "
        "(HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1 do the same)",
    )
    add(
        "--streaming",
        action="store_true",
        help="read hub datasets as they download and keep nothing (with sample caps)",
    )


def add_choice(arguments: argparse.ArgumentParser) -> None:
    """Which documents are taken, and what is said of them."""
    add = arguments.add_argument
    add(
        "--weights",
        nargs="+",
        type=float,
        default=[],
        metavar="W",
        help="one for each --input: read so much of each that their sizes are in this proportion, nothing twice",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="weights of size^(1/T): above 1 small inputs weigh more (default 1: each is read whole)",
    )
    add(
        "--near-duplicates",
        type=float,
        default=0.0,
        metavar="X",
        help="leave out documents whose similarity to an earlier one is X or more (Jaccard index of runs of five "
        "words; 0.8 finds reprints, 1 exact repetition; validation text that training holds too); default 0: none",
    )
    add(
        "--signature-salt",
        type=Path,
        metavar="FILE",
        help="a secret of 16 bytes or more that facilities share, and the coordinator does not: keys their signatures",
    )
    add(
        "--share-signatures",
        type=Path,
        metavar="FILE",
        help="write keyed signatures of the documents kept here, for a facility that shall leave them out",
    )
    add(
        "--drop-signatures",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="leave out documents that nearly equal those of other facilities, by the signatures these shared",
    )
    add("--language", default="", metavar="TAGS", help='what the text is in, such as "it, en": recorded, not checked')


def add_running(arguments: argparse.ArgumentParser) -> None:
    """What is accepted, shown and replaced."""
    add = arguments.add_argument
    add(
        "--allow-overlap",
        action="store_true",
        help="accept validation documents that are in training too (default: at most 1 in 100, compared by content)",
    )
    add("--show", type=int, default=0, metavar="N", help="print the first N training documents, what bears loss marked")
    add("--replace", action="store_true", help="make --out again if it holds a dataset made otherwise")
    add("--json", action="store_true", help="print the manifest as JSON instead of a summary")
    add_log_options(arguments)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float, int], None]]:
    """Progress on stderr: share of all sources read, documents, current source; lines where it is not a terminal."""
    if not sys.stderr.isatty():
        yield progress_lines(sys.stderr)
        return
    from tqdm import tqdm

    form = "{desc}{percentage:3.0f}%|{bar}| {postfix[0]} documents [{elapsed}<{remaining}]"
    bars: list[tqdm] = []  # none before the first document, so that nothing is shown when nothing is to be done

    def progress(source: str, share: float, documents: int) -> None:
        if not bars:
            bars.append(tqdm(total=1.0, bar_format=form, postfix=["0"], file=sys.stderr, mininterval=0.2))
        (bar,) = bars
        bar.postfix[0] = f"{documents:,}"
        if source:
            bar.desc = f"{source[-24:]}: "
        bar.update(max(share - bar.n, 0.0))

    try:
        yield progress
    finally:
        for bar in bars:
            bar.close()


def progress_lines(out: TextIO, clock: Callable[[], float] = time.monotonic) -> Callable[[str, float, int], None]:
    """Writes a line at most every `LINE_SECONDS`, the first after as many: for logs, which a bar would fill."""
    last = clock()

    def progress(source: str, share: float, documents: int) -> None:
        nonlocal last
        if clock() - last >= LINE_SECONDS:
            last = clock()
            where = f" ({source})" if source else ""
            print(f"{share:.0%} read, {number_of(documents, 'document')}{where}", file=out, flush=True)

    return progress


def summary(dataset: PreparedDataset, *, reused: bool) -> str:
    """What was prepared, in lines for a person; `reused`: it was there already."""
    manifest = dataset.manifest
    lines = [
        f"{unicode_name(str(dataset.directory))}: {'prepared before by the same command' if reused else 'prepared'}"
    ]
    if manifest.task == IMAGES:
        return "\n".join([*lines, *summary_of_images(dataset)])
    for name, split in manifest.splits.items():
        more = f", {number_of(split.truncated_documents, 'document')} cut" if split.truncated_documents else ""
        without = "loss, or with equal answers," if manifest.task == "preference" else "loss"
        more += f", {split.dropped_documents:,} without {without} left out" if split.dropped_documents else ""
        more += f", {number_of(split.empty_documents, 'empty document')} skipped" if split.empty_documents else ""
        more += f", {split.duplicate_documents:,} near duplicates left out" if split.duplicate_documents else ""
        more += (
            f", {split.elsewhere_documents:,} left out that other facilities hold" if split.elsewhere_documents else ""
        )
        more += f", {split.overlapping_documents:,} documents also in training" if split.overlapping_documents else ""
        if dataset.marked:
            more = f", {split.padding_tokens:,} tokens of filling{more}" if split.padding_tokens else more
            more = f", {split.loss_tokens:,} bear loss{more}"
        if split.document_tokens:
            least, median, long, most = split.document_tokens
            more += f"; tokens of a document: {least:,} to {most:,}, median {median:,}, 95 % up to {long:,}"
        documents, blocks = number_of(split.documents, "document"), number_of(split.blocks, "block")
        lines.append(
            f"  {name}: {documents}, {split.tokens:,} tokens, {blocks} of "
            f"{manifest.block_tokens}, tail of {split.tail_tokens:,} tokens left out{more}"
        )
    lines += [summary_of_classes(manifest.classes)] * bool(manifest.classes)
    return "\n".join(lines)


def prepare_text(options: argparse.Namespace, progress: Callable[[str, float, int], None]) -> Prepared:
    """Text to blocks of tokens, as the command line says."""
    from facility.preparing.build import Request, prepare_dataset
    from facility.preparing.sources import Fields

    label = options.label_field or ("label" if options.task == "classification" else None)
    request = Request(
        inputs=options.inputs,
        tokenizer=options.tokenizer,
        out=options.out,
        block_tokens=options.block_tokens,
        task=options.task,
        template=options.template,
        chat_template=options.chat_template,
        loss=options.loss,
        documents=options.documents,
        fields=Fields(
            text=options.text_field,
            pair=options.pair_field,
            label=label,
            numbered=bool(options.classes) and all(name.isdecimal() for name in options.classes),
            unit=options.text_unit,
            chat=options.task in ("chat", "preference"),
            pairs=options.task == "preference",
        ),
        validation=options.validation,
        validation_share=options.validation_share,
        train_samples=options.train_samples,
        validation_samples=options.validation_samples,
        split=options.split,
        validation_split=options.validation_split,
        streaming=options.streaming,
        model=options.model,
        processes=options.processes,
        replace=options.replace,
        allow_overlap=options.allow_overlap,
        near_duplicates=options.near_duplicates,
        salt=options.signature_salt,
        share_signatures=options.share_signatures,
        drop_signatures=options.drop_signatures,
        language=options.language,
        weights=options.weights,
        temperature=options.temperature,
        classes=options.classes,
    )
    with panics_refused(f"the tokenizer in {options.tokenizer}"):
        return prepare_dataset(request, progress=progress)


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    options = parse_arguments(arguments, argv)
    check_options(arguments, options)
    if options.offline:  # read when the libraries are imported, below
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with progress_bar() as progress:
        prepared = prepare_images_of(options, progress) if options.task == IMAGES else prepare_text(options, progress)
    if options.json:
        report = {
            "path": unicode_name(str(options.out)),
            "reused": prepared.reused,
            **dataclasses.asdict(prepared.dataset.manifest),
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print(summary(prepared.dataset, reused=prepared.reused))
    if options.show:
        from facility.preparing.preview import preview_documents

        print(preview_documents(prepared.dataset, options.show, colour=sys.stdout.isatty()))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
