"""The remote commands of a transfer: lines for a facility's shell, or requests to the gate in front of it."""

from __future__ import annotations

import posixpath
import shlex

from facility.exchange.gate_requests import ARRIVED, GATE

ANNOUNCE, BEGINS = "echo crossfed-begins; ", b"crossfed-begins\n"
"""Begins a command whose output counts, and that output: what the account's start-up files print comes before it."""


def after_noise(text: str) -> str:
    """The answer in what a command printed whose line begins with `ANNOUNCE`; the whole where only its end is kept."""
    _, mark, answer = text.partition(BEGINS.decode().strip())
    return answer.strip() if mark else text


class ShellDialect:
    """What a shell, GNU tar, dd and find are asked for."""

    nothing = ":"
    hold = "echo; exec cat >/dev/null"
    """Prints a line, then keeps the connection until its input ends."""
    sizes = f"{ANNOUNCE}xargs -0 stat -L -c %s --"

    def put_tree(self, target: str) -> str:
        place = shlex.quote(target)
        return f"rm -rf {place} && mkdir -p {place} && tar xpf - -C {place}"

    def put_file(self, target: str, mode: int, *, empty: bool) -> str:
        place = shlex.quote(target)
        start = f"rm -rf {place} && mkdir -p {shlex.quote(posixpath.dirname(target))} && "
        return start + (f": > {place}" if empty else f"cat > {place}") + f" && chmod {mode:o} {place}"

    def put_piece(self, path: str, offset: int, length: int) -> str:
        return (
            f"dd of={shlex.quote(path)} bs=1M seek={offset} count={length} oflag=seek_bytes "
            "iflag=fullblock,count_bytes conv=notrunc status=none"
        )

    def confirmed(self, command: str) -> str:
        """The command, made to print `ARRIVED` at its end."""
        return f"{command} && echo {ARRIVED}"

    def listing(self, path: str) -> str:
        found = f"find -L {shlex.quote(path)} -type f -printf '%s %m %P\\0' -o -type d -printf 'd %m %P\\0'"
        return ANNOUNCE + found

    def get_piece(self, path: str, offset: int, length: int) -> str:
        flags = "iflag=skip_bytes,count_bytes,fullblock status=none"
        return f"{ANNOUNCE}dd if={shlex.quote(path)} bs=1M skip={offset} count={length} {flags}"

    def get_file(self, path: str) -> str:
        return f"{ANNOUNCE}cat -- {shlex.quote(path)}"

    def get_tree(self, path: str) -> str:
        names = "--no-recursion --null --verbatim-files-from -T -"
        return f"{ANNOUNCE}tar chf - --format=gnu -C {shlex.quote(path)} {names}"


class GateDialect(ShellDialect):
    """The requests of `facility.gating.grammar`."""

    nothing = f"{GATE} nothing"
    hold = f"{GATE} hold"
    sizes = f"{GATE} sizes"

    def put_tree(self, target: str) -> str:
        return f"{GATE} put-tree {shlex.quote(target)}"

    def put_file(self, target: str, mode: int, *, empty: bool) -> str:
        return f"{GATE} put-file {shlex.quote(target)} {mode:03o}"

    def put_piece(self, path: str, offset: int, length: int) -> str:
        return f"{GATE} put-piece {shlex.quote(path)} {offset} {length}"

    def confirmed(self, command: str) -> str:
        return command

    def listing(self, path: str) -> str:
        return f"{GATE} list {shlex.quote(path)}"

    def get_piece(self, path: str, offset: int, length: int) -> str:
        return f"{GATE} get-piece {shlex.quote(path)} {offset} {length}"

    def get_file(self, path: str) -> str:
        return f"{GATE} get-file {shlex.quote(path)}"

    def get_tree(self, path: str) -> str:
        return f"{GATE} get-tree {shlex.quote(path)}"


SHELL = ShellDialect()
"""Of every facility that gives the coordinator a shell."""
