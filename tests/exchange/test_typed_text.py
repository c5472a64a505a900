"""A file that an editor of another system saved is refused in the same words wherever a person's text is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.template_inheritance import read_template
from facility.gating.policy import read_policy

READERS = {"federation": read_federation, "policy": read_policy, "template": read_template}
SCRIPT = "#!/bin/bash\n{{ streamflow_command }}\n"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-8-sig", "is UTF-8 with a byte order mark, expected plain UTF-8"),
        ("utf-16", "is UTF-16, expected plain UTF-8"),
        ("latin-1", "is not UTF-8 text"),
    ],
)
def test_text_that_is_not_plain_utf_8_is_refused(reader: str, encoding: str, words: str, tmp_path: Path):
    """A mark before `#!/bin/bash` was sent along, and the queue refused every job's script."""
    file = tmp_path / "file"
    file.write_bytes(("# é\n" + SCRIPT).encode(encoding))
    with pytest.raises(ConfigurationError, match=words):
        READERS[reader](file)


def test_a_template_has_line_ends_of_one_kind(tmp_path: Path):
    file = tmp_path / "template.sh"
    file.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    assert read_template(file) == SCRIPT


def test_a_template_that_no_shell_reads_is_refused(tmp_path: Path):
    file = tmp_path / "template.sh"
    file.write_bytes(SCRIPT.encode() + b"\0")
    with pytest.raises(ConfigurationError, match="holds a null character"):
        read_template(file)
