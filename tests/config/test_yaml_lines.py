"""YAML is read as plain data with the line of every key; what is not plain is refused at its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.config.yaml_lines import Lined
from facility.exchange.errors import ConfigurationError

PLAIN = """\
a: 1e-4
numbers: [1.0e-4, 1.0e+4, 0, 1_000, .5, 0.5, .inf, 1234567890123456789, +1, -1, 1.]
words: [1e5, 12e03, 1.5e3, 09, 0o10, 04:00:00, n, y, 'x', "x\\n", x y, !!str 3]
truths: [yes, on, off, true, ~, null]
block: |
  b
  c
folded: >
  b
  c
anchors: {first: &x {b: 1}, second: *x, third: &n 3, fourth: *n}
merged:
  <<: *x
  d: 2
"""
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 10)}]\n" for before, after in zip("abcdef", "bcdefg", strict=True)
)
DEEP = ["a: " + "[" * 10_000, "a: " + "{b: " * 3000, "- " * 3000, "a: " + "!!seq [" * 60, "? " * 60]
"""What a parser without bounds takes minutes for, or all of Python's stack."""


def read(tmp_path: Path, content: str | bytes) -> Lined:
    file = tmp_path / "x.yml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Lined(file)


def test_values_are_those_of_pyyaml(tmp_path: Path):
    lined = read(tmp_path, PLAIN)
    assert lined.data == yaml.safe_load(PLAIN)
    assert [type(value) for value in lined.data["numbers"]] == [type(v) for v in yaml.safe_load(PLAIN)["numbers"]]
    assert type(lined.data["truths"][0]) is bool and type(lined.data["block"]) is str


@pytest.mark.parametrize("word", ["0123", "-010", "0x1f", "0b11", "2:00", "1:30:00", "190:20:30.15"])
def test_a_number_to_another_base_is_text(tmp_path: Path, word: str):
    """YAML 1.1 takes an account 0123 for 83, and a limit of 2:00 for 120 of whatever the unit is."""
    assert read(tmp_path, f"a: {word}").data == {"a": word}


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "true", "No"])
def test_a_key_that_yaml_takes_for_true_or_false_is_text(tmp_path: Path, word: str):
    """`notify: {on: [done]}` needs no quotes, nor does a facility called `no` among weights."""
    lined = read(tmp_path, f"a: 1\nb:\n  {word}: {{{word}: {word}}}\n")
    assert lined.data["b"] == {word: {word: word.lower() in ("on", "yes", "true")}}
    assert lined.lines[f"b.{word}"] == 3
    with pytest.raises(ConfigurationError, match="given twice"):
        read(tmp_path, f"{word}: 1\n'{word}': 2\n")


def test_every_key_has_its_line(tmp_path: Path):
    lines = read(tmp_path, "a:\n  b: 1\n  c:\n    - d: 2\n    - 3\n").lines
    assert {key: lines[key] for key in ("a", "a.b", "a.c", "a.c[0]", "a.c[0].d", "a.c[1]")} == {
        "a": 1,
        "a.b": 2,
        "a.c": 3,
        "a.c[0]": 4,
        "a.c[0].d": 4,
        "a.c[1]": 5,
    }


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("a: 1\nb: {c: 1, c: 2}", 2, "key 'c' is given twice"),
        ("a: 1\na: 2", 2, "key 'a' is given twice"),
        ("a:\n  b: &x [1, *x]", 2, "alias of the value that holds it"),
        (BOMB, 1, "more than 100000 values"),
        ("a: 1\nb: !python/name:os.system x", 2, "has the YAML tag"),
        ("a: 1\nb: !own {c: 1}", 2, "has the YAML tag !own"),
        ("a: 1\n2: 3", 2, "key 2 is not plain text"),
        ("a: 1\nb: 2020-01-01", 2, "put it between quotes"),
        ("a: 1\nb: [1\nc", 3, "not valid YAML"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        *((deep, 1, "nested too deeply") for deep in DEEP),
        ("a: &a 1\nb: *a\nc: " + "[" * 60, 3, "nested too deeply"),
        ("a: 1\n" + "? " * 12, 2, "a key is a list or a mapping"),
        ("a: 1\nb: [1, " + "9" * 400 + "]", 2, "b[1] is a number of more than 64 bits"),
        ("a: 1\nb: -9223372036854775809", 2, "b is a number of more than 64 bits"),
        ("a: 1\r\nb: x\x00y", 2, "holds the control character U+0000: remove it"),
        ("a: 1\nb: !!bool maybe", None, "does not fit its tag"),
        ("a: 1\nb: !!int ''", None, "does not fit its tag"),
        ("a: 1\nb: !!set x", None, "does not fit its tag"),
        ('a: "\\UFFFFFFFF"', None, "an escape names no character"),
        ("", None, "the file is empty"),
        ("a: 1".encode("utf-16"), None, "is UTF-16, expected plain UTF-8"),
        (b"\xef\xbb\xbfa: 1", None, "byte order mark"),
        (b"a: \xff", None, "is not UTF-8 text"),
        (b"a: 1 #" + b"x" * (4 << 20), None, "expected at most"),
    ],
    ids=lambda value: f"{len(value)} signs" if isinstance(value, str | bytes) and len(value) > 45 else None,
)
def test_what_is_not_plain_is_refused(tmp_path: Path, content: str | bytes, line: int | None, words: str):
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, content)
    assert words in str(caught.value) and caught.value.line == line
