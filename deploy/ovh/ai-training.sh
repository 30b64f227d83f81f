#!/usr/bin/env bash
# Answers a file of requests in a job of OVHcloud AI Training. ai-training.md explains it.
#
#   ai-training.sh IMAGE MODEL CONTAINER@REGION [FLAG OF OCTAVO RUN-BATCH...]
#
# CONTAINER is an object storage container that holds requests.jsonl and takes answers.jsonl.
# Variables: NAME, FLAVOR, CPUS or GPUS (at most 4), HF_TOKEN, REQUESTS, ANSWERS.
set -euo pipefail

[ $# -ge 3 ] || { echo "usage: $0 IMAGE MODEL CONTAINER@REGION [FLAG...]" >&2; exit 2; }
image=$1 model=$2 container=$3
shift 3

options=(--name "${NAME:-octavo-batch}" --volume "$container:/workspace/batch:rw")
if [ -n "${GPUS:-}" ]; then
    # A V100S has no bfloat16.
    options+=(--flavor "${FLAVOR:-ai1-1-gpu}" --gpu "$GPUS")
    compute=(--device cuda --dtype half)
else
    options+=(--flavor "${FLAVOR:-ai1-1-cpu}" --cpu "${CPUS:-8}")
    compute=(--device cpu)
fi
[ -z "${HF_TOKEN:-}" ] || options+=(--env "HF_TOKEN=$HF_TOKEN")

exec ovhai job run "${options[@]}" "$image" -- \
    octavo run-batch --model "$model" "${compute[@]}" \
    -i "/workspace/batch/${REQUESTS:-requests.jsonl}" -o "/workspace/batch/${ANSWERS:-answers.jsonl}" "$@"
