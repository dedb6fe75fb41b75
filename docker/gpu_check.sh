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
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
fi
if [[ ${1:-} == --bundle ]]; then
    own=python3
    [[ -x .venv/bin/python ]] && own=.venv/bin/python
    exec "${PYTHON:-$own}" docker/gpu_kit/bundle.py "${@:2}"
fi
exec "${PYTHON:-python3}" docker/gpu_kit/kit.py "$@"
