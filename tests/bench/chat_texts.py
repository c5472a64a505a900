"""Real conversations of two languages for a federated SFT, and a small model with random weights to begin with.

    pip download --no-deps --dest DIR chatterbot-corpus && unzip DIR/chatterbot_corpus-*.whl -d DIR
    python tests/bench/chat_texts.py --data DIR/chatterbot_corpus/data --out DIR/chats

Reads the YAML of the ChatterBot corpus (Gunther Cox and others, BSD 3-Clause): English at `north`, as OpenAI writes
conversations, Italian at `south`, as ShareGPT does; one in ten for validation. `model` is a Llama of 640,000 parameters
with a byte-level BPE of 1,024 tokens of both and a template that marks answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

LANGUAGES = {"north": "english", "south": "italian"}
VALIDATION, LEAST = 10, 60
"""One conversation in so many is for validation, at least `LEAST`."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations(folder: Path) -> list[list[str]]:
    """Question, answer, question, answer ...; in an order that is always the same."""
    import yaml

    found = []
    for file in sorted(folder.glob("*.yml")):
        for told in yaml.safe_load(file.read_text())["conversations"]:
            turns = [str(turn).strip() for turn in told if turn is not None and str(turn).strip()]
            if len(turns) >= 2:
                found.append(turns[: len(turns) // 2 * 2])
    random.Random(0).shuffle(found)
    return found


def record(turns: list[str], facility: str) -> dict[str, Any]:
    if facility == "north":
        return {"messages": [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]}
    return {"conversations": [{"from": ("human", "gpt")[n % 2], "value": turn} for n, turn in enumerate(turns)]}


def save_model(out: Path, texts: list[str]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(out)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the corpus' folder `data`, one folder a language")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    a = parser.parse_args()
    read = {facility: conversations(a.data / language) for facility, language in LANGUAGES.items()}
    if none := [str(a.data / LANGUAGES[facility]) for facility, found in read.items() if not found]:
        parser.error(f"argument --data: found no conversations in {', '.join(none)}, expected the corpus' YAML files")
    a.out.mkdir(parents=True)
    texts: list[str] = []
    for facility, found in read.items():
        held_out = max(LEAST, len(found) // VALIDATION)
        for name, part in (("validation", found[:held_out]), ("train", found[held_out:])):
            lines = (json.dumps(record(turns, facility), ensure_ascii=False) + "\n" for turns in part)
            (a.out / f"{facility}-{name}.jsonl").write_text("".join(lines))
        texts += [turn for turns in found for turn in turns]
        print(f"{facility}: {len(found)} conversations")
    save_model(a.out / "model", texts)


if __name__ == "__main__":
    main()
