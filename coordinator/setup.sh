#!/usr/bin/env bash
# Set the coordinator up: its environment, and the initial model, fetched or converted, and checked by loading it.
# A second run changes nothing and takes seconds.
[ -n "${BASH_VERSION:-}" ] || { echo "error: this is a script for bash: bash $0" >&2; exit 2; }
set -euo pipefail
unset CDPATH  # with it, cd prints
export PYTHONSAFEPATH=1  # no module of the folder that this is run in, a published model's for instance, is one of ours

usage() {
    cat <<'TEXT'
usage: bash coordinator/setup.sh [options]

  --venv DIR         environment to make or use (default .venv in the checkout)
  --python PROGRAM   Python 3.11 or newer to make it from (default python3)
  --wheelhouse DIR   install from these files only, without network
  --model NAME|DIR   model of the hub (ORG/NAME), or a Hugging Face checkpoint, as safetensors
  --revision NAME    revision of a hub model (default main)
  --out DIR          where the converted model goes (default .crossfed/models/<last part of --model>)
  --dtype NAME       bfloat16, float16 or float32: the dtype that travels (default bfloat16)
  -h, --help         this text

Then: set `model:` in workflow/federation.yml to --out, and run crossfed check.
TEXT
}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
meanwhile() { local words=$1; shift; bash "$here/facility/meanwhile.sh" "setup: $words" "$@"; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$here/.venv python=python3 wheelhouse= model= out= convert=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) usage; exit 0 ;;
        --venv|--python|--wheelhouse|--model|--revision|--out|--dtype) [ $# -ge 2 ] || fail "$1 needs a value"
            [ -n "$2" ] || fail "$1 is empty, expected a value: is a variable of the shell not set?" ;;
        *) fail "unknown option $1; --help lists them" ;;
    esac
    case "$1" in
        --venv) venv=$2 ;;
        --python) python=$2 ;;
        --wheelhouse) wheelhouse=$2 ;;
        --model) model=$2 ;;
        --revision) convert+=(--revision "$2") ;;
        --out) out=$2 ;;
        --dtype) convert+=(--dtype "$2") ;;
    esac
    shift 2
done
[ -n "$model" ] || [ -z "$out${convert[*]-}" ] || fail "--out, --dtype and --revision have no effect without --model: leave them out"
command -v "$python" >/dev/null || fail "$python does not exist; name another by --python"
[ "$("$python" -c 'print(6 * 7)')" = 42 ] || fail "$python does not run, see above, or is no Python; name another by --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version 2>&1) is too old, expected 3.11 or newer; name another by --python"

if ! "$venv/bin/python" -I -c 'import pip' 2>/dev/null; then  # not there, not finished, or its Python is gone
    say "making $venv with $("$python" --version)"
    clear=()
    if [ ! -x "$venv/bin/python" ] && [ -f "$venv/pyvenv.cfg" ]; then clear=(--clear); fi
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || fail "$python could not make $venv, see above; name another by --python"
fi
stamp=$( { echo "$wheelhouse"; "$venv/bin/python" --version; cat "$here/pyproject.toml" "$here/constraints.txt"; } | cksum)
if [ "$(cat "$venv/.coordinator" 2>/dev/null)" = "$stamp" ] || { [ -f "$venv/.ready" ] && [ "$venv/.ready" -nt "$here/pyproject.toml" ]; }; then
    say "packages: unchanged"
else
    say "packages: facility and coordinator, as pinned in constraints.txt"
    from=()
    if [ -n "$wheelhouse" ]; then from=(--no-index --find-links "$wheelhouse" --no-build-isolation); fi
    meanwhile "packages: still installing" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" ${from[@]+"${from[@]}"} -e "$here[coordinator]" \
        || fail "pip could not install, see above: $venv has no room (disk, quota), or an index lacks a package; on a host without internet use --wheelhouse (crossfed bundle makes one)"
    echo "$stamp" >"$venv/.coordinator"
fi
if [ -n "$model" ]; then
    "$venv/bin/python" -m coordinator.model --source "$model" --out "${out:-$here/.crossfed/models/$(basename "$model")}" ${convert[@]+"${convert[@]}"}
fi
say "done: source $venv/bin/activate"
