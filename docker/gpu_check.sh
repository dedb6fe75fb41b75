#!/usr/bin/env bash
# Check hvd_pipe on a machine with a GPU and no network, in fifteen minutes; docs/gpu-check.md has more.
#
#   docker/gpu_check.sh --bundle FILE [--python 3.12]    where there is a network: make the archive
#   docker/gpu_check.sh [--out DIR]                      on the machine, in the unpacked archive
#   docker/gpu_check.sh --cpu [--out DIR]                the same over Gloo, where there is no GPU
#
# PYTHON names the Python that has torch (python3, and .venv's for an archive, if unset).
set -euo pipefail
cd "$(dirname "$0")/.."
own=python3
[[ ${1:-} == --bundle && -x .venv/bin/python ]] && own=.venv/bin/python
exec "${PYTHON:-$own}" docker/gpu_kit.py "$@"
