#!/usr/bin/env bash
# Run a command that may be silent for minutes, and say every 25 seconds on stderr that it goes on:
#     bash meanwhile.sh WORDS COMMAND...
# What the command prints, and its exit code, stay its own.
set -euo pipefail
[ $# -ge 2 ] || { echo "error: found ${#} arguments, expected: bash $0 WORDS COMMAND..." >&2; exit 2; }
words=$1 code=0
shift
(   # without the lock of setup.sh, and with no sleep left behind that would hold the streams of an ssh session
    trap 'kill "${nap-}" 2>/dev/null; exit' TERM
    while sleep 25 & nap=$!; wait "$nap" && kill -0 $$ 2>/dev/null; do
        printf '%s (%s s)\n' "$words" "$SECONDS" >&2
    done
) 9>&- &
beat=$!
"$@" || code=$?
kill "$beat" 2>/dev/null && wait "$beat" 2>/dev/null || true
exit "$code"
