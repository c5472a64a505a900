"""Conversations, and chat templates in the manner of several families, with a tokenizer that knows their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.preparing.corpora import sentences

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "llama": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|stop|>\\n\\n' }}"
        "{{ m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}",
        ["<|start|>", "<|stop|>", "<|eot|>"],
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
        "{{ (first if loop.first else '') + m.content | trim + '<end>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}",
        ["<turn>", "<end>"],
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|close|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        ["<|system|>", "<|user|>", "<|assistant|>", "<|close|>"],
    ),
    "marked": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|bot|>' }}"
        "{% generation %}{{ m.content + '<|over|>' }}{% endgeneration %}"
        "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}",
        ["<|bot|>", "<|over|>", "<|system|>", "<|user|>"],
    ),
}


def save_chat_tokenizer(directory: Path, family: str = "chatml", *, template: str | None = None) -> Path:
    """A byte-level BPE with a family's special tokens and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    source, special = TEMPLATES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(200), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = source if template is None else template
    fast.save_pretrained(directory)
    return directory


def chats(count: int, *, turns: int = 2, start: int = 0, system: bool = True) -> list[dict[str, Any]]:
    """Conversations of so many questions and answers, each different, every second one with a system message."""
    texts = iter(sentences(2 * count * turns, start))
    result = []
    for number in range(count):
        messages = [{"role": "system", "content": "Rispondi."}] if system and number % 2 else []
        for _ in range(turns):
            messages += [{"role": "user", "content": next(texts)}, {"role": "assistant", "content": next(texts)}]
        result.append({"messages": messages})
    return result
