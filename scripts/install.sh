#!/usr/bin/env bash
# Make a virtual environment and install AlignedServe into it.
# Usage: install.sh PYTHON VENV TARGET     (TARGET: "." or ".[dev]")
set -euo pipefail
python=$1
venv=$2
target=$3
cd "$(dirname "$0")/.."

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "AlignedServe needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3 ..." >&2
    exit 1
fi
# pip comes last into a virtual environment: one without it was broken off, and is made again.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "Making a virtual environment in $venv"
    "$python" -m venv --clear "$venv"
fi

# PyTorch first: without an NVIDIA driver the CPU build is wanted, which is gigabytes smaller. Where pip already finds
# a CPU build of the pinned version (a local wheel, a mirror), no index is named.
torch=$(grep '^torch==' constraints.txt)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "Installing PyTorch"
    # pip is asked what it would take; a build that is not for the CPU brings CUDA packages along.
    plan=$("$venv/bin/python" -m pip install --quiet --dry-run --report - "$torch" 2>/dev/null || true)
    if [ -e /proc/driver/nvidia/version ] || ! grep -q '"name": "nvidia-\|"name": "cuda-' <<<"$plan"; then
        "$venv/bin/python" -m pip install --quiet --constraint constraints.txt "$torch"
    else
        "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu \
            --extra-index-url https://pypi.org/simple "$torch"
    fi
fi
echo "Installing AlignedServe and what it needs"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable "$target"
