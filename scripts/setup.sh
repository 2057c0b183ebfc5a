#!/usr/bin/env bash
# Make a virtual environment and install FedGist in it, with a CPU build of PyTorch where one is
# offered. Usage: scripts/setup.sh VENV EXTRAS, e.g. scripts/setup.sh .venv codecs,dev
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
extras=${2:-}
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    say "Python must be 3.11 or newer. Got $("$python" --version 2>&1): set PYTHON=/path/to/python3.11"
    exit 2
fi
if [ ! -x "$venv/bin/pip" ]; then
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && apt-get install -y -qq python3-venv
        else
            say "the venv module must be installed. Run: sudo apt-get install python3-venv"
            exit 2
        fi
    fi
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/pip" --disable-pip-version-check -q)
version=$(sed -n 's/^torch==//p' constraints.txt)
if ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
    say "Installing PyTorch $version ..."
    # The default index serves a CUDA build of several GB on Linux: take a CPU build if there is one.
    "${pip[@]}" install "torch==$version+cpu" 2>/dev/null ||
        "${pip[@]}" install --extra-index-url https://download.pytorch.org/whl/cpu \
            --retries 1 --timeout 10 "torch==$version+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==$version"
fi
say "Installing FedGist ..."
"${pip[@]}" install -c constraints.txt -e ".${extras:+[$extras]}"
