"""A tokenizer that the tests of a module prepare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preparing.corpora import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe")
