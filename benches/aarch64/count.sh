#!/usr/bin/env bash
# Counts the instructions of a product on an emulated AArch64 processor: STORAGE ISA ROWS, as in `Q4_1 dotprod 8`.
# Needs gcc, the packages gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu and qemu-user, and the target of Rust.
set -euo pipefail
cd "$(dirname "$0")/../.."
plugin=target/count.so
gcc -shared -fPIC -o $plugin benches/aarch64/count.c
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu -plugin $PWD/$plugin"

# A few repetitions and more: the difference is what the products take.
counted() {
    OCTAVO_COUNTED="$1 $2 $3 $4" cargo test -q --release -p octavo-backend-cpu --target aarch64-unknown-linux-gnu --lib -- \
        --ignored --exact product::tests::products_to_count --test-threads 1 2>&1 | sed -n 's/^instructions: //p'
}

few=$(counted "$@" 8)
many=$(counted "$@" 40)
# Seven panels of sixteen rows and 1024 inputs.
awk -v count=$(((many - few) / 32)) -v macs=$((7 * 16 * 1024 * $3)) -v what="$*" \
    'BEGIN { printf "%s: %d instructions, %.2f multiply-adds per instruction\n", what, count, macs / count }'
