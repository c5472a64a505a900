"""The tokenizer as a directory of its own: loading, its digest, its copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from facility.dataset import DatasetError
from facility.exchange.checkpoints.companions import copy_named_templates
from facility.exchange.checkpoints.families import checked_text_part, most_positions
from facility.exchange.checkpoints.model_files import CONFIG, read_model_file
from facility.exchange.checkpoints.tokenizer import VOCABULARIES, WHOLE, check_loads, tokenizer_digest
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.panics import panics_refused

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "tekken.json",
    "preprocessor_config.json",
)
CHOSEN_BY = ("model_type", "tokenizer_class", "transformers_version")
"""Keys of `config.json` that transformers looks at where `tokenizer_config.json` names no class, as BERT's."""
UNLIMITED = 10**15
"""transformers writes 1e30 where a tokenizer knows no limit."""


def tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's own files in a directory that may also hold a model."""
    if not directory.is_dir():
        raise DatasetError(f"{directory} is not a directory: expected a tokenizer saved by save_pretrained")
    files = sorted(p for p in directory.iterdir() if p.is_file() and (p.name in FILES or p.suffix in VOCABULARIES))
    if not any(
        p.name in ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json") or p.suffix in VOCABULARIES
        for p in files
    ):
        if (directory / "tokenizer_config.json").is_file():
            raise DatasetError(
                f"the tokenizer in {directory} has no file with its vocabulary (tokenizer.json, vocab.json, vocab.txt "
                "or *.model): copy it from where the model came from; ByT5 and CANINE, which have none, are not read"
            )
        raise DatasetError(f"{directory} holds no tokenizer: expected tokenizer.json, vocab.json, vocab.txt or *.model")
    return files


def tokenizer_sha256(directory: Path) -> str:
    """Which tokenizer a directory holds, as `dataset.json` says it; raises `DatasetError` where it holds none."""
    tokenizer_files(directory)
    return tokenizer_digest(directory) or ""


def ids_of(tokenizer: Any) -> int:
    """The ids lie below this; a vocabulary with holes has fewer tokens."""
    return max([len(tokenizer), *(number + 1 for number in tokenizer.get_vocab().values())])


def file_digests(directory: Path) -> dict[str, str]:
    """Digest of each of the tokenizer's own files, by name; those that do not decide ids (chat templates) left out."""
    others = ("chat_template.jinja", "preprocessor_config.json")
    return {path.name: sha256_of(path) for path in tokenizer_files(directory) if path.name not in others}


def encode_differently(one: Path, other: Path) -> bool:
    """Whether two tokenizers of the same vocabulary encode otherwise, or name other special tokens.

    Files of equal bytes are not loaded; what transformers writes otherwise when it saves them again is no difference.
    """
    if not other.is_dir():
        return True
    if file_digests(one) == file_digests(other):
        return False
    first, second = (load_tokenizer(directory) for directory in (one, other))
    return bool(_encodes_by(first) != _encodes_by(second))


def _encodes_by(tokenizer: Any) -> tuple[Any, ...]:
    """Special tokens with their ids, and the pipeline of a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    specials = {name: tokenizer.convert_tokens_to_ids(one) for name, one in tokenizer.special_tokens_map.items()}
    return specials, json.loads(backend.to_str()) if backend is not None and hasattr(backend, "to_str") else None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, links followed, and of a model's `config.json` what its class is chosen by."""
    target.mkdir()
    if chosen := {key: value for key, value in _configuration(source).items() if key in CHOSEN_BY}:
        (target / "config.json").write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name)
    copy_named_templates(source, target)


def load_tokenizer(directory: Path) -> Any:
    """Load it with `AutoTokenizer`, from disk only and without running code from the directory."""
    tokenizer_files(directory)
    if (directory / WHOLE).is_file():
        check_loads(directory / WHOLE)
    from transformers import AutoTokenizer

    try:
        with panics_refused("tokenizer.json"):
            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise DatasetError(f"{directory}: the tokenizer cannot be loaded: {error}") from None


def length_limit(tokenizer: Any, *directories: Path) -> tuple[int, str] | None:
    """The limit on tokens of the tokenizer, or of a model's `config.json` in `directories`, and where it stands."""
    limits: list[tuple[int, str]] = []
    if 0 < tokenizer.model_max_length < UNLIMITED:
        limits.append((int(tokenizer.model_max_length), "the tokenizer's model_max_length"))
    for directory in directories:
        if value := most_positions(_text_part(directory)):
            limits.append((value, f"the positions that {directory / 'config.json'} has"))
    return min(limits) if limits else None


def vocabulary_size(model: Path) -> int | None:
    """Rows of a model's embedding; None where its `config.json` does not say."""
    value = _text_part(model).get("vocab_size")
    return value if isinstance(value, int) else None


def _configuration(directory: Path) -> dict[str, Any]:
    """A model's `config.json`; {} without the file. Raises `CheckpointError`."""
    return read_model_file(directory) if (directory / CONFIG).is_file() else {}


def _text_part(directory: Path) -> dict[str, Any]:
    """What it says of the part that reads text. Raises `CheckpointError`."""
    return checked_text_part(_configuration(directory), directory)
