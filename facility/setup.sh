#!/usr/bin/env bash
# Set a facility up: Python environment, caches, env.sh for the job templates, tokenised dataset, self-check.
# Run it on a login node, from a checkout or an unpacked bundle. A second run changes nothing and takes seconds.
[ -n "${BASH_VERSION:-}" ] || { echo "error: this is a script for bash: bash $0" >&2; exit 2; }
set -euo pipefail
umask 077  # what is made here is text that may not leave: nobody else's to read
unset CDPATH  # with it, cd prints
export PYTHONNOUSERSITE=1  # as in jobs: what an account has installed for itself is not looked at
export PYTHONSAFEPATH=1  # nor are modules of the folder that this is run in, which no digest of a bundle covers

usage() {
    cat <<'TEXT'
usage: bash facility/setup.sh [options] [-- arguments for `python -m facility.prepare`]

  --home DIR            where everything goes (default ~/crossfed); templates call it <home>
  --python PROGRAM      Python 3.11 or newer (default python3)
  --module NAME         `module load NAME` first, here and in every job (may be repeated)
  --conda NAME          use this conda environment instead of a venv
  --as-is               use --python as it is, packages and all (a module's or a container's); install nothing
  --torch KIND          cuda, rocm, cpu, or auto (default: looks at the drivers here, the queue and the wheelhouse)
  --torch-index URL     extra package index for torch (default: PyTorch's own for rocm and cpu)
  --wheelhouse DIR      install from these files only, without network (`crossfed bundle` makes them)
  --template NAME|FILE  job template for the self-check, through its queue if it has one (default: run it here)
  --fill NAME=VALUE     value for one of the template's placeholders (may be repeated)
  --no-self-check       leave the self-check out
  --gate KEY.pub        let this key of a coordinator in through the gate alone: a forced command that
                        does what <home>/policy.yml allows (docs/how-to/run-behind-a-gate.md)
  --coordinator NAME    beside --gate, for a further coordinator: a gate of its own in <home>/gates/NAME
  --authorized-keys F   file that sshd reads for this account (default ~/.ssh/authorized_keys)
  -h, --help            this text

After `--`: for instance --input it.jsonl --tokenizer tokenizer --out ~/crossfed/data/it --block-tokens 512
TEXT
}

say() { printf 'setup: %s\n' "$*"; }
room() {  # of the home, and of where pip and others put files first; each disk once
    local found= free disk limit
    while read -r _ _ _ free _ disk; do found+="${found:+, }$((free / 1024)) MB free on $disk"; done < <(df -Pk "$home" "${TMPDIR:-/tmp}" 2>/dev/null | tail -n +2 | sort -u -k 6)
    limit=$(ulimit -f)
    [ "$limit" = unlimited ] || found+="${found:+, }no file may exceed $limit KB (ulimit -f)"
    echo "${found:-its free room is not known}"
}
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
again() { printf 'error: %s\n' "$*" >&2; exit 75; }  # nothing is to be changed: the same command may succeed later
meanwhile() { local words=$1; shift; bash "$here/facility/meanwhile.sh" "setup: $words" "$@"; }

if [ -z "${HOME:-}" ]; then unset HOME; HOME=$(echo ~); export HOME; fi  # cron and containers set none: the account's
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$HOME/crossfed python=python3 conda= as_is= torch=auto torch_index= wheelhouse= template= check=yes
gate= coordinator= authorized=$HOME/.ssh/authorized_keys
modules=() fills=() prepare=()
while [ $# -gt 0 ]; do
    case "$1" in
        --home|--python|--module|--conda|--torch|--torch-index|--wheelhouse|--template|--fill|--gate|--coordinator|--authorized-keys)
            [ $# -ge 2 ] || fail "$1 needs a value"
            [ -n "$2" ] || fail "$1 is empty, expected a value: is a variable of the shell not set?" ;;&
        --home) home=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --module) modules+=("$2"); shift 2 ;;
        --conda) conda=$2; shift 2 ;;
        --as-is) as_is=yes; shift ;;
        --torch) torch=$2; shift 2 ;;
        --torch-index) torch_index=$2; shift 2 ;;
        --wheelhouse) wheelhouse=$2; shift 2 ;;
        --template) template=$2; shift 2 ;;
        --fill) [[ $2 = ?*=* ]] || fail "--fill is '$2', expected NAME=VALUE"; fills+=(--fill "$2"); shift 2 ;;
        --no-self-check) check=; shift ;;
        --gate) gate=$2; shift 2 ;;
        --coordinator) coordinator=$2; shift 2 ;;
        --authorized-keys) authorized=$2; shift 2 ;;
        -h|--help) usage; exit 0 ;;
        --) shift; prepare=("$@"); break ;;
        *) fail "unknown option $1; --help lists them" ;;
    esac
done
[ -n "$template" ] || [ ${#fills[@]} = 0 ] || fail "--fill has no effect without --template, whose placeholders it fills: leave it out"
[ -n "$gate" ] || [ "$authorized" = "$HOME/.ssh/authorized_keys" ] || fail "--authorized-keys has no effect without --gate: leave it out"
[ -z "$as_is" ] || [[ $torch = auto && -z "$torch_index$wheelhouse" ]] || fail "--torch, --torch-index and --wheelhouse have no effect with --as-is, which installs nothing: leave them out"
[ -z "$wheelhouse" ] || [ -z "$torch_index" ] || fail "--torch-index has no effect with --wheelhouse, which asks no index: leave it out"
case "$torch_index" in *//*@*) say "packages: while this runs, ps shows every account of this host the login in --torch-index; in ~/.netrc, which pip reads, nobody sees it" ;; esac
case "$torch" in auto|cuda|rocm|cpu) ;; *) fail "--torch is '$torch', expected auto, cuda, rocm or cpu" ;; esac
[ -z "$wheelhouse" ] || [ -d "$wheelhouse" ] || fail "--wheelhouse $wheelhouse is not a directory; make it with: crossfed bundle --out wheelhouse"
[ -z "$template" ] || [ -f "$template" ] || [ ! -f "$here/templates/$template.sh" ] || template=$here/templates/$template.sh
[ -z "$template" ] || [ -f "$template" ] || fail "--template $template is not a file, and no template has that name; there are: $(cd "$here/templates" && printf '%s ' *.sh | sed 's/\.sh / /g; s/ $//')"

if [ -n "$gate" ]; then  # one line: what follows it would be a line of authorized_keys without the gate
    ssh-keygen -lf "$gate" >/dev/null || fail "--gate $gate is not a public ssh key; ask the coordinator for one (*.pub)"
    mapfile -t keys <"$gate"
    [[ ${#keys[@]} -eq 1 && ${keys[0]} =~ ^[a-z0-9@.-]+\ [A-Za-z0-9+/]+=*(\ |$) ]] || fail "--gate $gate is not one line with one key (lines: ${#keys[@]}); expected one public ssh key on one line, without options; one key comes in by one gate"
fi
[[ -z "$coordinator" || ( -n "$gate" && "$coordinator" =~ ^[A-Za-z0-9][A-Za-z0-9_-]*$ ) ]] || fail "--coordinator is '$coordinator', expected a name of letters, digits, _ and -, beside --gate"

# A bundle says what it holds (crossfed bundle); what was altered or lost on the way is not installed.
if [ -f "$here/../SHA256SUMS" ]; then
    find "$here" -depth -type d -name __pycache__ -exec rm -rf {} +  # made here, or by whoever wants it to be run
    (cd "$here/.." && sha256sum --check --quiet --strict SHA256SUMS) || fail "the bundle in $(dirname "$here") is not what its SHA256SUMS says; copy it again"
    added=$(cd "$here/.." && LC_ALL=C comm -13 <(cut -c67- SHA256SUMS | LC_ALL=C sort) <(find wheelhouse crossfed evaluation ! -type d 2>/dev/null | LC_ALL=C sort))
    [ -z "$added" ] || fail "the bundle in $(dirname "$here") holds files that its SHA256SUMS does not name, such as ${added%%$'\n'*}; remove them, or copy it again"
    say "bundle: every file is what SHA256SUMS says; its own sha256 is $(sha256sum <"$here/../SHA256SUMS" | cut -d' ' -f1)"
elif [ -f "$here/../bundle.json" ]; then
    fail "the bundle in $(dirname "$here") has no SHA256SUMS, so that nothing says whether it is whole; copy it again"
fi

mkdir -m 700 -p "$home" && mkdir -p "$home"/{cache,state} || fail "--home $home cannot be made, see above; name a directory of yours, on a file system with room, that the nodes see"
home=$(cd "$home" && pwd)
mine=$(mktemp -d "$home/.mine.XXXXXX") || fail "--home $home cannot be written to, see above; name a directory of yours"  # shown as ours, whatever numbers a file system gives
made=$(stat -c %u "$mine"); rmdir "$mine"
for place in "$home" "$home"/{cache,state}; do
    owner=$(stat -Lc %u "$place")
    [ "$owner" = "$made" ] || [ "$owner" = 0 ] || fail "$place belongs to another account ($(stat -Lc %U "$place")), which could exchange what jobs of yours run; name a directory of your own by --home"
done
[ -z "$(find "$home/" -maxdepth 0 -perm -0002)" ] || fail "--home $home may be written by every account, which could exchange what jobs of yours run: chmod o-w $home"
[ -z "$gate" ] || case "$home" in *[[:space:]\"\'\\\$\`\;\&\|\<\>\(\)\*\?\[\]\#\!]*) fail "--home $home holds a blank, a quote or another character that means something to a shell, which a forced command in authorized_keys cannot quote; name another" ;; esac
exec 9>>"$home/.setup.lock"
locked=0
flock -n 9 || locked=$?
case $locked in
    0) ;;
    1) again "another setup.sh works in $home; wait for it" ;;
    *) say "lock: $home is on a file system without locks; let no second setup.sh work there meanwhile" ;;
esac

# 1. Python
RECENT='import sys; sys.exit(sys.version_info < (3, 11))'
set +eu  # a site's own scripts count on neither
for name in ${modules[@]+"${modules[@]}"}; do
    command -v module >/dev/null || { [ ! -f /etc/profile.d/modules.sh ] || . /etc/profile.d/modules.sh; }
    if ! command -v module >/dev/null; then
        "$python" -c "$RECENT" 2>/dev/null || fail "there is no 'module' command here, but --module $name was given; name a Python 3.11 or newer by --python"
        say "module: there is no such command here; going on without ${modules[*]}, since $python is recent enough"
        modules=(); break
    fi
    module load "$name" || fail "module load $name failed; 'module avail' lists what there is"
done
if [ -n "$conda" ]; then
    command -v conda >/dev/null || fail "there is no 'conda' command here, but --conda $conda was given"
    { . "$(conda info --base)/etc/profile.d/conda.sh" && conda activate "$conda"; } || fail "conda activate $conda failed; 'conda env list' lists what there is"
    python=python
fi
set -eu
at_error='fail "a command of setup.sh ended with code $?, see above; what is written goes to $home ($(room))"'
trap "$at_error" ERR
command -v "$python" >/dev/null || fail "$python does not exist; name another by --python, or load one by --module"
python=$(command -v "$python")
[[ $python = /* ]] || python=$PWD/$python
[ "$("$python" -c 'print(6 * 7)')" = 42 ] || fail "$python does not run, see above, or is no Python; name another by --python, or load one by --module"
"$python" -c "$RECENT" || fail "$("$python" --version 2>&1) is too old, expected 3.11 or newer; name another by --python, or load one by --module"
if [ -n "$template" ]; then  # before minutes go into packages
    PYTHONPATH=$here "$python" - "$template" ${fills[@]+"${fills[@]}"} <<'PYTHON' || exit 2
import sys
from pathlib import Path
from facility.exchange.errors import CrossFedError
from facility.exchange.messages.template_inheritance import read_template, unfilled_placeholders
given = [word.partition("=")[0] for word in sys.argv[2:] if word != "--fill"]
try:
    text = read_template(Path(sys.argv[1]))
except ModuleNotFoundError:  # jinja2 comes with torch: the self-check looks again
    sys.exit()
except CrossFedError as error:
    sys.exit(f"error: {error}")
if left := unfilled_placeholders(text, dict.fromkeys(given, "")):
    sys.exit(f"error: {sys.argv[1]} has placeholders that nothing fills: {', '.join(left)}; add " + " ".join(f"--fill {name}=VALUE" for name in left))
PYTHON
fi
theirs= more=  # what modules bring by PYTHONPATH is a part of a Python that is used as it is, and of no other
if [ -n "$as_is" ] && [ ${#modules[@]} -gt 0 ] && [ -n "${PYTHONPATH:-}" ]; then theirs=$PYTHONPATH more='${PYTHONPATH:+:$PYTHONPATH}'; fi
unset PYTHONPATH
if [ -n "$as_is$conda" ]; then
    run=$python
else
    run=$home/venv/bin/python
    if ! "$run" -I -c 'import pip' 2>/dev/null; then  # not there, not finished, or the Python that it was made with is gone
        say "making $home/venv with $("$python" --version)"
        rm -f "$home"/.setup-stamp "$home"/.imports "$home"/.self-check  # they are of another one
        "$python" -m venv --clear "$home/venv" || fail "$python could not make $home/venv, see above; is there room for it (disk, quota; $(room))? Else name another by --python, load one by --module, or use one that has the packages by --as-is"
    fi
fi

# 2. Which torch, and why
if [ "$torch" = auto ]; then
    if compgen -G "$wheelhouse/torch-*+rocm*" >/dev/null; then torch=rocm why="the wheelhouse holds torch for ROCm"
    elif compgen -G "$wheelhouse/torch-*+cpu*" >/dev/null; then torch=cpu why="the wheelhouse holds torch for CPUs"
    elif compgen -G "$wheelhouse/torch-*" >/dev/null; then torch=cuda why="the wheelhouse holds torch for CUDA"
    elif compgen -G "/dev/nvidia[0-9]*" >/dev/null; then torch=cuda why="this host has NVIDIA devices"
    elif [ -e /dev/kfd ]; then torch=rocm why="this host has AMD devices"
    elif gres=$(sinfo -h -o %G 2>/dev/null) && grep -qi 'gpu.*mi[0-9]' <<<"$gres"; then torch=rocm why="the queue has AMD GPUs ($(sort -u <<<"$gres" | grep -i mi | head -1))"
    elif grep -qi gpu <<<"${gres:-}"; then torch=cuda why="the queue has GPUs ($(sort -u <<<"$gres" | grep -i gpu | head -1)); say --torch rocm if they are AMD's"
    else torch=cpu why="no GPU driver here and none named by the queue; say --torch cuda or --torch rocm if the nodes have them"; fi
else why="you said so"; fi
[ -n "$torch_index" ] || case "$torch" in
    rocm) torch_index=https://download.pytorch.org/whl/rocm7.0 ;;
    cpu) torch_index=https://download.pytorch.org/whl/cpu ;;
esac

# 3. Packages: only when something they depend on changed
PLACE='import platform, sys; libc, version = platform.libc_ver(); recent = libc == "glibc" and int(version.split(".")[1]) >= 28; print("%d.%d-%s" % (*sys.version_info[:2], platform.machine() if recent else "none"))'
IMPORTS='import torch, transformers, safetensors, facility.round'
lists=("$here/pyproject.toml" "$here/constraints.txt" "$here/facility/requirements.lock")
[ ! -f "$wheelhouse/requirements.txt" ] || lists+=("$wheelhouse/requirements.txt")  # of another bundle in the same place
install() {  # what pip says passes by, and of a file system that took no more ends the set-up: no index lacks anything
    local code=0 refused= todo=
    { refused=$(
        set -o pipefail +e; trap - ERR
        meanwhile "packages: still installing" "$run" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 >&3 | while IFS= read -r line; do
            printf 'setup: pip: %s\n' "${line#ERROR: }" >&4  # whether it ends the set-up is said below
            case "$line" in *"No space left on device"*|*"Disk quota exceeded"*|*"File too large"*) echo "$line" ;; esac
        done
    ) || code=$?; } 3>&1 4>&2
    refused=${refused%%$'\n'*}
    case "$refused" in
        *"File too large"*) todo="raise the limit on file sizes (\`ulimit -f\` says $(ulimit -f) KB)" ;;
        *quota*) todo="free some" ;;  # it leaves less than a file system has
        *) todo="free some ($(room))" ;;
    esac
    [ "$code" = 0 ] || [ -z "$refused" ] || again "pip found no room: ${refused##*Errno*] }; $todo, then run this again"
    return "$code"
}
stamp=$( { echo "$torch $torch_index $wheelhouse $run"; "$run" --version; cat "${lists[@]}"; } | cksum)
if [ -n "$as_is" ]; then
    say "packages: those of $run, as they are"
elif [ "$(cat "$home/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    if [ -n "$(cat "$home/.setup-as-is" 2>/dev/null)" ]; then run=$python as_is=yes; fi
    say "packages: unchanged (torch for $torch)"
else
    say "packages: torch for $torch, because $why"
    "$run" - "$here/pyproject.toml" >"$home/.requirements" <<'PYTHON'
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]))
PYTHON
    pinned=(-c "$here/constraints.txt")
    if [ -f "$wheelhouse/requirements.txt" ]; then
        install -r "$wheelhouse/requirements.txt" --require-hashes --no-deps --no-index --find-links "$wheelhouse" || fail "pip could not install the wheelhouse, see above: the wheelhouse does not fit $("$run" --version) on $(uname -m) or is not what its digests say; then bundle again with that --python-version and --platform"
    elif [ -n "$wheelhouse" ]; then
        install "${pinned[@]}" -r "$home/.requirements" --no-index --find-links "$wheelhouse" || fail "pip could not install, see above: the wheelhouse lacks a package for $("$run" --version) on $(uname -m); then bundle again with that --python-version and --platform"
    else
        got=yes lock=$here/facility/requirements.lock
        if grep -q "^# for:.* $("$run" -c "$PLACE")\( \|$\)" "$lock"; then
            say "packages: by the digests in $lock; torch has none there, since its build is this site's choice"
            install --require-hashes --no-deps --only-binary=:all: --retries 2 -r "$lock" || got=
        else
            say "packages: $lock has no digests for $("$run" --version) on $(uname -m); the versions of constraints.txt, as the index has them"
        fi
        if [ -n "$got" ] && [ -n "$torch_index" ] && ! PIP_INDEX_URL=$torch_index install "${pinned[@]}" torch --retries 1 --timeout 15; then  # words of a command are seen by every account
            [ "$torch" = cpu ] || again "torch for $torch could not be installed from ${torch_index/\/\/*@/\/\/}, see above; name another by --torch-index"
            say "packages: ${torch_index/\/\/*@/\/\/} gives none; taking the default index's torch, which runs on CPUs too"
        fi
        if [ -z "$got" ] || ! install "${pinned[@]}" -r "$home/.requirements" --retries 2; then
            base=$python
            [ -z "$conda" ] && PYTHONPATH=$here "$base" -c "$IMPORTS" 2>/dev/null || again "pip could not install, see above: an index gave something else than the digests say; on a host without internet use --wheelhouse (crossfed bundle makes one)"
            say "packages: pip could not install what is asked for, see above; using those of $base, which has what a facility needs (as --as-is does)"
            run=$base as_is=yes
        fi
    fi
    echo "$as_is" >"$home/.setup-as-is"
    echo "$stamp" >"$home/.setup-stamp"  # last: it says that both are so
fi
if [ -z "$as_is" ]; then  # the checkout itself, without copying it
    site=$("$run" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    [ "$(cat "$site/crossfed.pth" 2>/dev/null)" = "$here" ] || printf '%s\n' "$here" >"$site/crossfed.pth"
fi
export PYTHONPATH=$here${theirs:+:$theirs}
probed="$home/.imports $theirs $(stat -c %Y "$run" "$here/facility/round.py" | cksum) $stamp"
[ "$(cat "$home/.imports" 2>/dev/null)" = "$probed" ] || said=$("$run" -c "$IMPORTS" 2>&1) || fail "$run lacks what a facility needs (${said##*$'\n'}); leave --as-is out, or install it there"
[ "$(cat "$home/.imports" 2>/dev/null)" = "$probed" ] || echo "$probed" >"$home/.imports"

# 4. Data of the tasks that a bundle was made for (crossfed bundle --eval)
if [ -d "$here/../evaluation" ]; then
    mkdir -p "$home/cache/huggingface"
    (
        cd "$here/../evaluation"
        find . -type d -print0 | (cd "$home/cache/huggingface" && xargs -0 mkdir -p)
        find . ! -type d -print0 | while IFS= read -r -d '' file; do  # whole or not at all; what is there stays
            to=$home/cache/huggingface/$file
            [ -e "$to" ] || [ -L "$to" ] || { cp -a "$file" "$to.new" && mv "$to.new" "$to"; }
        done
    )
    say "tasks: their data are in $home/cache/huggingface"
fi

# 5. env.sh: what every job sources
quote() { printf '%q' "$1"; }
programs=$(dirname "$run")
if [ ! "$programs/python3" -ef "$run" ]; then  # jobs say python3, and that is another one there
    programs=$home/bin start="exec $(quote "$run") \"\$@\""
    mkdir -p "$programs"
    if [ "$(tail -n 1 "$programs/python3" 2>/dev/null)" != "$start" ]; then
        printf '#!/bin/bash\n%s\n' "$start" >"$programs/.python3.new"
        chmod 700 "$programs/.python3.new"
        mv "$programs/.python3.new" "$programs/python3"
    fi
fi
{
    echo "# Written by facility/setup.sh; sourced by the job templates. Run setup.sh again instead of editing it."
    echo "crossfed_here=\$PWD; cd $(quote "$home")  # what modules put on a search path may be '', the folder that a job begins in"
    [ ${#modules[@]} = 0 ] || echo 'command -v module >/dev/null || [ ! -r /etc/profile ] || . /etc/profile'
    for name in ${modules[@]+"${modules[@]}"}; do echo "module load $(quote "$name")"; done
    if [ -n "$conda" ]; then echo ". \"\$(conda info --base)/etc/profile.d/conda.sh\" && conda activate $(quote "$conda")"; fi
    echo "export PATH=$(quote "$programs"):\$PATH PYTHONPATH=$(quote "$here")$more"
    echo "export CROSSFED_HOME=$(quote "$home") CROSSFED_STATE=$(quote "$home/state")"
    echo "export HF_HOME=$(quote "$home/cache/huggingface") TORCH_HOME=$(quote "$home/cache/torch") TRITON_CACHE_DIR=$(quote "$home/cache/triton")"
    echo "export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONNOUSERSITE=1"
    echo "[ ! -f $(quote "$home/site.sh") ] || . $(quote "$home/site.sh")  # the site's own, never written by setup.sh"
    cat <<'SH'  # as facility/gating/search_paths.py has it
set -f; IFS=:; for n in PATH LD_LIBRARY_PATH PYTHONPATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH; do eval "w=\${$n-}"; r=; for e in $w; do case $e in /*) r=$r${r:+:}$e ;; esac; done; [ -z "$w" ] || export "$n=$r"; done; unset IFS; set +f
cd "$crossfed_here"
SH
} >"$home/.env.sh.new"
if cmp -s "$home/.env.sh.new" "$home/env.sh"; then rm "$home/.env.sh.new"; say "env.sh: unchanged"
else mv "$home/.env.sh.new" "$home/env.sh"; say "env.sh: written to $home/env.sh"; fi
chmod 700 "$home/state"

# 6. Dataset
if [ ${#prepare[@]} -gt 0 ]; then
    say "dataset: python -m facility.prepare ${prepare[*]}"
    HF_HOME=$home/cache/huggingface "$run" -m facility.prepare "${prepare[@]}"
fi

# 7. Self-check, once for this environment and template
if [ -n "$check" ]; then
    digest=$( { echo "$stamp ${fills[*]-}"; cat "$home/env.sh" ${template:+"$template"}; } | cksum)
    if [ "$(head -1 "$home/.self-check" 2>/dev/null)" = "$digest" ]; then say "self-check: passed before: $(tail -n +2 "$home/.self-check")"
    else
        say "self-check: a small model takes three steps, which is a minute once it begins"
        trap - ERR; set +eu; . "$home/env.sh"; set -eu; trap "$at_error" ERR  # as in a job
        result=$(meanwhile "self-check: it goes on" "$run" -m facility.selfcheck --home "$home" ${template:+--template "$template"} ${fills[@]+"${fills[@]}"}) || fail "the self-check failed; see above"
        printf '%s\n%s\n' "$digest" "$result" >"$home/.self-check"
        say "self-check: $result"
    fi
fi

# 8. The gate: the coordinator's key runs one command of ours, whatever it asks for
if [ -n "$gate" ]; then
    place=$home${coordinator:+/gates/$coordinator}
    mkdir -p "$place"
    print=$(ssh-keygen -lf "$gate" | cut -d' ' -f2)
    if [ ! -f "$place/policy.yml" ]; then
        sed -e "s|/home/alice/crossfed|$home|" -e "s|SHA256:[A-Za-z0-9+/]*|$print|" "$here/facility/policy-example.yml" >"$place/policy-example.yml"
        fail "$place/policy.yml does not exist; $place/policy-example.yml explains every key: copy and edit it, then run this again"
    fi
    {
        echo '#!/bin/bash -p'  # neither BASH_ENV nor functions out of the environment
        echo "# Written by facility/setup.sh --gate; sshd runs it in place of whatever the coordinator asks for."
        echo '# Variables that a client may send (AcceptEnv) and that lead Python, the loader, the scheduler or a job astray.'
        echo 'for name in $(compgen -e); do'
        echo '    case $name in BASH_*|ENV|IFS|PS4|LD_*|PYTHON*|CROSSFED_*|SLURM_*|SBATCH_*|SQUEUE_*|SCANCEL_*|SACCT_*|SCONTROL_*|PBS_*|FLUX_*|HF_*|TRANSFORMERS_*|TORCH*|TRITON_*|CUDA_*|NCCL_*|RCCL_*|GLOO_*) unset "$name" ;; esac'
        echo '    case $name in TMPDIR|TMP|TEMP|XDG_*_HOME|XDG_*_DIRS|CC|CXX|*FLAGS|GCONV_PATH|LOCPATH|PERL*|SSL_*|OPENSSL_*|SSH_ASKPASS*|*_proxy|*_PROXY) unset "$name" ;; esac'
        echo '    case $name in WANDB_*|MLFLOW_*|MASTER_*|RANK|LOCAL_RANK|WORLD_SIZE) unset "$name" ;; esac'
        echo '    case $name in MODULE*|LMOD_*|_LM*|LOADEDMODULES|SINGULARITY*|APPTAINER*|PODMAN_*|DOCKER_*|CONDA_*|VIRTUAL_ENV*|EASYBUILD_*|SPACK_*) unset "$name" ;; esac'
        echo '    case $name in OMPI_*|PMIX_*|PRTE_*|PMI_*|MPICH_*|I_MPI_*|UCX_*|FI_*|ROCR_*|HIP_*|HSA_*|HOSTALIASES|LOCALDOMAIN|RES_OPTIONS|KRB5_*|MUNGE_*) unset "$name" ;; esac'
        echo 'done'
        for name in SLURM_CONF PBS_CONF_FILE PBS_EXEC PBS_SERVER FLUX_URI; do  # where the scheduler is, as it is known here
            [ -z "${!name:-}" ] || echo "export $name=$(quote "${!name}")"
        done
        echo "export PATH=$(quote "$PATH") CROSSFED_HOME=$(quote "$home") CROSSFED_STATE=$(quote "$home/state")"
        [ -z "$theirs" ] || echo "export PYTHONPATH=$(quote "$theirs")"
        [ -z "${LD_LIBRARY_PATH:-}" ] || echo "export LD_LIBRARY_PATH=$(quote "$LD_LIBRARY_PATH")"
        echo "exec $(quote "$run") -s -P -c $(quote 'import sys; sys.path.insert(0, sys.argv.pop(1)); from facility.gate import main; sys.exit(main())') $(quote "$here") --policy $(quote "$place/policy.yml") --key \"\$1\""
    } >"$place/.crossfed-gate.new"
    chmod 700 "$place/.crossfed-gate.new"
    mv "$place/.crossfed-gate.new" "$place/crossfed-gate"
    (cd "$home" && CROSSFED_HOME=$home CROSSFED_STATE=$home/state "$run" -m facility.gate --policy "$place/policy.yml" --check) || fail "$place/policy.yml is not sound; see above"
    line="restrict,command=\"$place/crossfed-gate $print\" $(cut -d' ' -f1,2 "$gate")"
    body=$(cut -d' ' -f2 "$gate")
    mkdir -p "$(dirname "$authorized")"; touch "$authorized"
    if others=$(grep -F -- "$body" "$authorized" | grep -vxF -- "$line"); then
        fail "$authorized lets this key in another way too, so the gate would not hold; remove: ${others:0:120}..."
    fi
    [ -z "$(tail -c 1 "$authorized")" ] || echo >>"$authorized"  # a last line without its end would take ours in
    grep -qxF -- "$line" "$authorized" || printf '%s\n' "$line" >>"$authorized"
    chmod 600 "$authorized"
    say "gate: $print may run $place/crossfed-gate and nothing else; its log is $place/gate/audit.jsonl"
fi
say "done: $home"
