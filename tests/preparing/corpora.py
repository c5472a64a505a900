"""Tiny tokenizers and texts for the tests of preparing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = "il gatto nero dorme sul tetto della casa e sogna un pesce rosso che nuota nel mare calmo di giugno".split()


def sentences(count: int, start: int = 0) -> list[str]:
    """Different short texts of 3 to 13 words: the first three spell the text's number (below 8,000)."""
    base = len(WORDS)
    return [
        " ".join(
            [WORDS[i // base**2 % base], WORDS[i // base % base], WORDS[i % base]]
            + [WORDS[(7 * i + 3 * j) % base] for j in range(i % 11)]
        )
        for i in range(start, start + count)
    ]


def write_json_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def save_tokenizer(directory: Path, *, eos: str | None = "<|end|>", **settings: Any) -> Path:
    """A byte-level BPE of 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [eos] if eos else []
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(200), trainer)
    if eos:
        settings |= {"eos_token": eos, "pad_token": eos}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(directory)
    return directory


def save_bert_tokenizer(directory: Path) -> Path:
    """A word-piece tokenizer that adds [CLS] and [SEP], as BERT's do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    ).save_pretrained(directory)
    return directory


def die(documents: Any) -> None:
    """A worker that ends as if it had been killed for memory."""
    os._exit(9)
