#!/usr/bin/env bash
# Makes target/gpu-suite, all that tests/gpu/run.sh needs on a machine with a GPU: programs, kernels that are already compiled, test
# checkpoints and scripts, packed in a folder of less than 60 MB. Nothing of CUDA is needed here but NVRTC 12, a Python package.
#
# The default model, 98 MB that no compression makes much smaller, is cut into pieces in target/gpu-suite-model/1, 2 and 3, so that a
# transport with a limit carries the suite and one piece at a time. OCTAVO_GPU_NO_MODEL=1 leaves it out. OCTAVO_GPU_PROGRAMS names a
# folder with programs that are built already: octavo, kernels and backend.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${CARGO_TARGET_DIR:-target}
suite=target/gpu-suite
# What the folder may have, in bytes.
limit=60000000
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

# The program of a test, by the end of its source's path.
test_program() {
    sed -n "s|.*\"src_path\":\"[^\"]*/$1\".*\"executable\":\"\([^\"]*\)\".*|\1|p" <<<"$built" | tail -1
}

# The compiler that the budget of registers is held against, unless OCTAVO_CUDA_TOOLS or OCTAVO_CUDA_LIBS name another.
nvrtc() {
    if [ -n "${OCTAVO_CUDA_LIBS:-}" ]; then
        echo "$OCTAVO_CUDA_LIBS"
        return
    fi
    local tools=${OCTAVO_CUDA_TOOLS:-$target/gpu-suite-tools} found
    if [ ! -d "$tools" ]; then
        python3 -m venv "$tools"
        "$tools/bin/pip" install -q --disable-pip-version-check -r kernels/tests/requirements.txt
    fi
    found=$(find "$tools" -path '*cuda_nvrtc/lib' -type d | head -1)
    [ -n "$found" ] || { echo "no NVRTC in $tools: pip install -r kernels/tests/requirements.txt" >&2 && exit 1; }
    echo "$found"
}

programs=$stage/bin
mkdir -p "$programs"
if [ -n "${OCTAVO_GPU_PROGRAMS:-}" ]; then
    cp "$OCTAVO_GPU_PROGRAMS"/{octavo,kernels,backend} "$programs/"
else
    cargo build --release --bin octavo
    built=$(cargo test --release -p octavo-kernels --test emulated -p octavo-backend-cuda --test gpu --no-run --message-format json)
    strip -o "$programs/octavo" "$target/release/octavo"
    strip -o "$programs/kernels" "$(test_program kernels/tests/emulated/main.rs)"
    strip -o "$programs/backend" "$(test_program crates/backends/cuda/tests/gpu.rs)"
fi

# sm_80 for GPUs beside those that are served first; PTX of sm_70, which later chips run too.
mkdir -p "$stage/share/octavo"
libraries=$(nvrtc)
OCTAVO_CUDA_LIBS=$libraries "$programs/octavo" kernels build --output "$stage/share/octavo/kernels" \
    --arch "${OCTAVO_GPU_ARCH:-sm_80,sm_89,sm_90a,compute_70}" ${OCTAVO_GPU_ONLY_KERNELS:+--only "$OCTAVO_GPU_ONLY_KERNELS"}

cp -r models/testdata "$stage/testdata"
for shape in qwen3-8b qwen3-30b-a3b; do cp "models/shapes/$shape/config.json" "$stage/$shape.json"; done
changed=$(git status --porcelain --untracked-files=no)
echo "$(git rev-parse --short HEAD)${changed:+-changed}" >"$stage/COMMIT"

rm -rf "$suite" "$suite-model"
mkdir -p "$suite"
if [ -z "${OCTAVO_GPU_NO_MODEL:-}" ]; then
    "$programs/octavo" pull
    model=$("$programs/octavo" doctor | sed -n 's/^smollm2-[^ ]* *present: //p')
    name=$(basename "$model")
    for piece in 1 2 3; do
        mkdir -p "$suite-model/$piece"
        split -n "$piece/3" "$model" >"$suite-model/$piece/$name.part$piece"
    done
    (cd "$suite-model" && cat ./*/*.part? | sha256sum | sed "s|-$|$name|" && sha256sum ./*/*.part? | sed 's|  .*/|  |') \
        >"$stage/model.sha256"
fi
tar -C "$stage" -c . | xz -6 >"$suite/payload.tar.xz"
cp tests/gpu/run.sh tests/gpu/parts.sh tests/gpu/*.py tests/gpu/README.md "$suite/"
bytes=$(du -sb "$suite" | cut -f1)
echo "$suite: $bytes bytes"
for piece in "$suite-model"/*/; do
    [ ! -d "$piece" ] || echo "$piece: $(du -sb "$piece" | cut -f1) bytes"
done
[ "$bytes" -lt "$limit" ] || { echo "the suite has more than $limit bytes" >&2 && exit 1; }
