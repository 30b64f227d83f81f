#!/usr/bin/env bash
# Puts what tests/gpu/run.sh needs into target/gpu-suite: programs without debug information, test checkpoints, the scripts. A
# machine with a GPU then needs neither cargo nor this repository, only the folder: run.sh lies in it. Nothing of CUDA is needed here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${CARGO_TARGET_DIR:-target}
suite=target/gpu-suite
mkdir -p $suite

# The program of a test, by the package and the name that cargo gives it.
test_program() {
    sed -n "s|.*\"src_path\":\"[^\"]*/$1\".*\"executable\":\"\([^\"]*\)\".*|\1|p" <<<"$built" | tail -1
}

# The whole workspace, as everywhere: other features of dependencies would compile all of it again.
cargo build --release --workspace --bins
built=$(cargo test --workspace --no-run --message-format json)
programs=("$target/release/octavo" "$(test_program kernels/tests/emulated/main.rs)" "$(test_program crates/backends/cuda/tests/gpu.rs)")
names=(octavo kernels backend)
for i in 0 1 2; do
    strip -o "$suite/${names[i]}" "${programs[i]}"
done
rm -rf $suite/testdata
cp -r models/testdata $suite/testdata
cp tests/gpu/run.sh tests/gpu/*.py $suite/
cp models/shapes/qwen3-8b/config.json $suite/qwen3-8b.json
changed=$(git status --porcelain --untracked-files=no)
echo "$(git rev-parse --short HEAD)${changed:+-changed}" >$suite/COMMIT
du -sh $suite
