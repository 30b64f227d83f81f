#!/usr/bin/env bash
# Serves a model on OVHcloud AI Deploy, scaled by the number of running requests. ai-deploy.md explains it.
#
#   ai-deploy.sh IMAGE MODEL [FLAG OF OCTAVO SERVE...]
#
# Variables: NAME, FLAVOR, CPUS or GPUS, MIN_REPLICAS, MAX_REPLICAS, TARGET (running requests a replica), API_KEY,
# HF_TOKEN, VOLUME (a container of the object storage: NAME@REGION).
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: $0 IMAGE MODEL [FLAG...]" >&2; exit 2; }
image=$1 model=$2
shift 2

name=${NAME:-octavo}
port=8080

options=(
    --name "$name"
    --label "name=$name"
    --flavor "${FLAVOR:-ai1-1-cpu}"
    --default-http-port "$port"
    --probe-path /health
    --auto-min-replicas "${MIN_REPLICAS:-1}"
    --auto-max-replicas "${MAX_REPLICAS:-3}"
    --auto-custom-api-url "http://<SELF>:$port/metrics"
    --auto-custom-metric-format PROMETHEUS
    --auto-custom-value-location vllm:num_requests_running
    --auto-custom-target-value "${TARGET:-50}"
    --auto-custom-metric-aggregation-type AVERAGE
)
if [ -n "${GPUS:-}" ]; then
    options+=(--gpu "$GPUS")
    device=cuda
else
    options+=(--cpu "${CPUS:-8}")
    device=cpu
fi
[ -z "${API_KEY:-}" ] || options+=(--env "VLLM_API_KEY=$API_KEY")
[ -z "${HF_TOKEN:-}" ] || options+=(--env "HF_TOKEN=$HF_TOKEN")
[ -z "${VOLUME:-}" ] || options+=(--volume "$VOLUME:/workspace/.cache:rw:cache")

# The whole command: right both where it replaces the image's entry point and where it follows it.
exec ovhai app run "${options[@]}" "$image" -- \
    octavo serve "$model" --host 0.0.0.0 --port "$port" --device "$device" --shutdown-timeout 25 "$@"
