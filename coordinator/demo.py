"""`python -m coordinator.demo`: everything the demo needs, made on the spot with no download.

    DIR/text/<facility>/{train,validation}.jsonl   two unlike texts that come with every Python
    DIR/tokenizer/                                 one small byte-level BPE, trained on both
    DIR/model/                                     a small Llama with random weights, the model of round 0
    DIR/datasets/<facility>/                       both texts prepared (python -m facility.prepare)
    DIR/material.json                              what was made, written last

The two texts are the source code of the standard library (`stdlib`) and the prose of Python's reference manual as
`help()` shows it (`manual`). The result depends on the seed and on the Python that runs it. A complete DIR is
recognised.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import CrossFedError, InputError, exit_on_error
from facility.exchange.files.durable import as_umask_allows, new_directory, write_json, write_text
from facility.exchange.files.paths import shipped_path
from facility.exchange.json_values import values_in
from facility.exchange.logs import add_log_options
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.seeds import check_seed

FORMAT = 1
STAMP, UNFINISHED = "material.json", ".unfinished"
PARTS = ("text", "tokenizer", "model", "datasets")
END = "<|end|>"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the demo is: small enough for a minute or two on two cores, large enough to learn something."""

    characters: int = 450_000
    """Of each text, at most."""
    document_characters: int = 3_000
    """Length at which a file or chapter is parted into documents."""
    validation_every: int = 12
    """One in this many documents is held out."""
    vocabulary: int = 1024
    """Tokens of the BPE."""
    block_tokens: int = 64
    hidden: int = 128
    """Width of the Llama."""
    layers: int = 3
    heads: int = 4
    intermediate: int = 344
    """Width of its feed-forward layers."""


def stdlib_source() -> Iterator[str]:
    """The standard library's own source: its top-level modules, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("[a-z]*.py")):
        yield path.read_text(encoding="utf-8", errors="strict")


def manual_prose() -> Iterator[str]:
    """The chapters of Python's reference manual that `help()` shows, by name, without the rules under their titles."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        lines = topics[name].splitlines()
        yield "\n".join(line for line in lines if not (line and set(line) <= set('*=-~^"')))


TEXTS = {"stdlib": stdlib_source, "manual": manual_prose}


def documents(texts: Iterable[str], sizes: Sizes) -> list[str]:
    """Cut texts at empty lines into documents of about `document_characters`, up to `characters` in all."""
    found: list[str] = []
    total = 0
    for text in texts:
        held = ""
        for paragraph in text.split("\n\n"):
            held += paragraph + "\n\n"
            if len(held) >= sizes.document_characters:
                found.append(held.strip("\n"))
                total += len(held)
                held = ""
                if total >= sizes.characters:
                    return found
        if held.strip():
            found.append(held.strip("\n"))
            total += len(held)
    return found


def split_documents(found: Sequence[str], sizes: Sizes) -> dict[str, list[str]]:
    """Every `validation_every`-th document is held out, and nothing that is held out is trained on.

    The manuals of some Pythons (3.12) hold a chapter twice, under two names.
    """
    held = [document for number, document in enumerate(found, start=1) if number % sizes.validation_every == 0]
    rest = [document for number, document in enumerate(found, start=1) if number % sizes.validation_every]
    return {"train": [document for document in rest if document not in held], "validation": held}


def write_texts(out: Path, sizes: Sizes) -> dict[str, dict[str, int]]:
    """Write both texts as JSONL; returns characters by text and split."""
    counts: dict[str, dict[str, int]] = {}
    with new_directory(out / "text") as folder:
        for name, texts in TEXTS.items():
            try:
                found = documents(texts(), sizes)
            except (ImportError, OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"the text {name!r} cannot be read from this Python ({sys.executable}): {error}; "
                    "the demo needs the standard library's source and pydoc_data"
                ) from None
            splits = split_documents(found, sizes)
            if not all(splits.values()):
                raise InputError(
                    f"the text {name!r} of this Python has only {len(found)} documents; use a Python with its whole "
                    "standard library"
                )
            (folder / name).mkdir()
            for split, chosen in splits.items():
                lines = [json.dumps({"text": document}, ensure_ascii=False) for document in chosen]
                write_text(folder / name / f"{split}.jsonl", "\n".join(lines) + "\n")
            counts[name] = {split: sum(map(len, chosen)) for split, chosen in splits.items()}
    return counts


def train_tokenizer(out: Path, sizes: Sizes, names: Iterable[str] = tuple(TEXTS)) -> Any:
    """Train a byte-level BPE on the training documents of the named texts and save it as a tokenizer directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (line for name in names for line in (out / "text" / name / "train.jsonl").read_text("utf-8").splitlines())
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    with new_directory(out / "tokenizer") as folder:
        fast.save_pretrained(folder)
    return fast


def make_model(out: Path, tokenizer: Any, sizes: Sizes, seed: int) -> int:
    """Write a Llama with seeded random weights in bfloat16, as the model of round 0; returns its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of one file of a megabyte
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=4 * sizes.block_tokens,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(configuration)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    configuration.dtype = torch.bfloat16
    with new_directory(out / "model") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(as_umask_allows(0o644))  # safetensors writes 0600 whatever the umask
        checkpoint = open_checkpoint(folder)
        write_manifest(
            folder,
            Manifest(
                kind="model",
                federation="demo",
                round=0,
                dtypes=checkpoint.dtypes(),
                parameters=checkpoint.parameters,
            ),
        )
    return checkpoint.parameters


def prepare_datasets(out: Path, sizes: Sizes) -> None:
    """Prepare both texts as two facilities would: each by its own command, in its own process, side by side."""
    commands = []
    for name in TEXTS:
        text = out / "text" / name
        commands.append(
            [
                sys.executable,
                "-P",
                "-m",
                "facility.prepare",
                "--input",
                str(text / "train.jsonl"),
                "--validation",
                str(text / "validation.jsonl"),
                "--tokenizer",
                str(out / "tokenizer"),
                "--model",
                str(out / "model"),
                "--out",
                str(out / "datasets" / name),
                "--block-tokens",
                str(sizes.block_tokens),
                "--offline",
            ]
        )
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace")
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise CrossFedError(f"{' '.join(command)} ended with code {process.returncode}:\n{output}")


def print_progress(text: str) -> None:
    """What is being made, to a person who waits."""
    print(text, file=sys.stderr, flush=True)


def make_demo(
    out: Path,
    *,
    seed: int = 1,
    sizes: Sizes | None = None,
    datasets: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], bool]:
    """Make the demo's material below `out` unless it exists; returns the content of `material.json` and if it existed.

    `datasets`: prepare both texts, too, which takes as long as all else. `progress` is given a sentence before each
    part. Raises `InputError` when `out` holds something else under one of the names, or material made otherwise.
    """
    sizes = sizes or Sizes()
    parts = PARTS if datasets else PARTS[:-1]
    wanted = {"format": FORMAT, "seed": seed, "python": platform.python_version(), "sizes": vars(sizes)}
    try:
        found = values_in(out / STAMP)
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise InputError(f"{out / STAMP} cannot be read: {error}; remove {out} and try again") from None
    if found is not None:
        if {name: found.get(name) for name in wanted} != wanted or not all((out / part).is_dir() for part in parts):
            raise InputError(
                f"{out} holds material made otherwise (another seed, Python or version), or a part of it is gone: "
                "remove it (`make clean`) or choose another --out"
            )
        return found, True
    out.mkdir(parents=True, exist_ok=True)
    if not (out / UNFINISHED).exists():
        if there := [part for part in PARTS if (out / part).exists()]:
            raise InputError(f"{out} holds {', '.join(there)} but no {STAMP}: not made here; choose another --out")
        write_text(out / UNFINISHED, "The demo's material is being made here.\n")
    for part in PARTS:  # what an interrupted run left
        shutil.rmtree(out / part, ignore_errors=True)
    progress(f"making two texts and a tokenizer in {out}")
    characters = write_texts(out, sizes)
    tokenizer = train_tokenizer(out, sizes)
    progress("making a small Llama")
    parameters = make_model(out, tokenizer, sizes, seed)
    if datasets:
        progress("preparing a dataset for each facility")
        prepare_datasets(out, sizes)
    made = wanted | {"parameters": parameters, "characters": characters}
    write_json(out / STAMP, made)
    (out / UNFINISHED).unlink()
    return made, False


def make_federation(out: Path) -> Path:
    """Make the demo's material and its federation below `out`; returns federation.yml; an existing one is unchanged."""
    make_demo(out / ".crossfed" / "demo", progress=print_progress)
    file = out / "workflow" / "federation.yml"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        for name in (file.name, "federation.schema.json"):
            write_text(file.with_name(name), shipped_path(f"workflow/{name}").read_text(encoding="utf-8"))
    return file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.demo",
        description="Make the demo's text, tokenizer, model and two prepared datasets, with no download.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to fill")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the random weights (default 1)")
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")
    add_log_options(parser)
    options = parse_arguments(parser, argv)
    check_seed(options.seed)
    made, there = make_demo(options.out, seed=options.seed, progress=print_progress)
    if options.json:
        print(json.dumps(made, indent=2))
    else:
        texts = ", ".join(
            f"{name} ({sum(splits.values()):,} characters)" for name, splits in made["characters"].items()
        )
        state = "made before" if there else "made"
        print(f"{options.out}: {state}: a Llama of {made['parameters']:,} parameters and two texts, {texts}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
