"""A model that is trained on conversations is published with the template that they were put into words by."""

from __future__ import annotations

from pathlib import Path

from coordinator.preflight.chat_template import check_chat_template
from coordinator.preflight.probe_answer import DatasetAnswer

TOLD = {"north": DatasetAnswer(chat_template_sha256="a" * 64), "south": DatasetAnswer()}


def test_a_model_without_a_template_is_told_where_conversations_have_one(tmp_path: Path):
    """A base model trained with --chat-template became a published model that `apply_chat_template` refuses."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (row,) = check_chat_template(tmp_path, TOLD)
    assert row.verdict == "warning" and "chat_template.jinja before the first round" in row.fix
    assert not check_chat_template(
        tmp_path, {"north": DatasetAnswer(chat_template_sha256=""), "south": DatasetAnswer()}
    )
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert not check_chat_template(tmp_path, TOLD)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not check_chat_template(tmp_path, TOLD)
