#!/usr/bin/env bash
# What only a GPU can show. `tests/gpu/run.sh [PART...]`, parts: correctness serve. Without a GPU it says that it is skipped.
# OCTAVO_CUDA_LIBS names folders with the driver, NVRTC or cuBLASLt, where they are not in the usual places.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CARGO_TERM_COLOR=never

# Every path of the backend on small models: near f64 in each element type, quantised weights, recorded steps.
correctness() { cargo test -p octavo-backend-cuda --test gpu -- --nocapture; }

# The default model on the GPU and on the processor: the same question.
serve() {
    local device log server
    for device in cuda cpu; do
        log=$(mktemp)
        cargo run -q --release -- serve --device $device --port 0 2>"$log" &
        server=$!
        until grep -q 'listening on' "$log" || ! kill -0 $server 2>/dev/null; do sleep 0.2; done
        grep -E 'device:|ready after' "$log" || cat "$log"
        eval "$(sed -n 's/^.*try: //p' "$log") -sS --fail-with-body"
        echo
        kill -TERM $server
        wait $server
    done
}

if ! cargo run -q --release -- doctor | tee /dev/stderr | grep -q '^GPU 0'; then
    echo "skipped: no GPU"
    exit 0
fi
printf 'commit %s, %s\n' "$(git rev-parse --short HEAD)" "$(date -u +%F)"
[ $# -gt 0 ] || set -- correctness serve
for part in "$@"; do $part; done
