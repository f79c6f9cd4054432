#!/usr/bin/env bash
# What one NVIDIA GPU can show in 8 minutes, the most telling first: each step is a process of its own, and its line in
# $OUT/gpu_check.jsonl is there when it ends, so that a cut leaves the rest. See benchmarks/README.md.
#
#   benchmarks/gpu_check.sh [--dry-run] [--out FOLDER] [--wheels FOLDER] [--model PATH] [--minutes 8] [--only STEP,...]
#
# Installs nothing but into a temporary folder, and asks no index: the checkout is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
