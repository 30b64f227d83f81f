#!/usr/bin/env bash
# One part of the GPU suite in a process of its own: parts.sh PART. run.sh calls it, with
#   OCTAVO_GPU_SUITE    the folder of the programs
#   OCTAVO_GPU_OUT      the folder of the run's results
#   OCTAVO_GPU_SCRATCH  a folder for what is no result
#   OCTAVO_GPU_KEEP     a folder that outlives the run
# README.md describes the parts.
# shellcheck disable=SC2329 # Functions are called by the name of the part.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
suite=$OCTAVO_GPU_SUITE out=$OCTAVO_GPU_OUT scratch=$OCTAVO_GPU_SCRATCH keep=$OCTAVO_GPU_KEEP
# Automake's exit status of a test that cannot run here. The part says why.
skipped=77

skip() {
    echo "skipped: $*"
    return "$skipped"
}

# Python scripts lie beside run.sh.
python() {
    command -v python3 >/dev/null || skip "no python3" || return
    python3 "$@"
}

device=${OCTAVO_GPU_DEVICE:-cuda}
batch_sizes=${OCTAVO_GPU_BATCH_SIZES:-1,8,32,128}
contexts=${OCTAVO_GPU_CONTEXTS:-1024,4096}
prefill=${OCTAVO_GPU_PREFILL:-2048,8192}
kernel_rows=${OCTAVO_GPU_KERNEL_ROWS:-1,4,8,16,32,128}
min_time=${OCTAVO_GPU_MIN_TIME:-0.02}

# The ceilings of this very chip: copy bandwidth, and large products of cuBLASLt in bf16 and fp16 on random data.
limits() {
    "$suite/bin/octavo" bench limits --output-json "$out/limits.json" \
        --copy-bytes "${OCTAVO_GPU_COPY_BYTES:-4G}" --product-size "${OCTAVO_GPU_PRODUCT_SIZE:-8192}"
}

# Puts the flag that names the ceilings into `ceilings`, if they were measured.
measured_ceilings() {
    ceilings=()
    [ ! -f "$out/limits.json" ] || ceilings=(--limits "$out/limits.json")
}

# Runs some tests of a program, a kind of kernels or of steps, in a process of its own: a fault of the device spoils that process
# alone. Ends at the first failure, whose message is printed as it happens. Slot 2 leaves out kinds that passed in slot 1.
kind() {
    local name=$1 begun=$SECONDS code=0 verdict=passed passed
    passed=$keep/passed-$(cat "$suite/COMMIT")
    shift
    if [ -n "${OCTAVO_GPU_SKIP_PASSED:-}" ] && grep -qxF "$name" "$passed" 2>/dev/null; then
        echo "--- $name: passed in an earlier slot"
        return
    fi
    "$@" --nocapture 2>&1 | awk '{ print; fflush() } / FAILED$/ { failed = 1; exit } END { exit failed }' || code=1
    if [ "$code" = 0 ]; then echo "$name" >>"$passed"; else verdict=failed; fi
    echo "--- $name: $verdict, $((SECONDS - begun)) s"
    return "$code"
}

# Kinds of the tests of kernels that a device can run, attention and products first.
kernel_kinds() {
    local all name
    all=$("$suite/bin/kernels" --list 2>/dev/null | sed -n 's/^\([a-z_]*\)::.*: test$/\1/p' | sort -u)
    for name in attention attention_properties linear quantized; do
        grep -x "$name" <<<"$all" || true
    done
    grep -vxE "attention|attention_properties|linear|quantized|machine|detector|races|sanitizers|layout|device|banks" <<<"$all" || true
}

# Tests of kernels by their kinds. $1 is the value of OCTAVO_GPU; what follows goes to the program.
kernels() {
    local failed=0 name mode=$1
    shift
    for name in $(kernel_kinds); do
        kind "kernels $name ($mode)" env OCTAVO_GPU="$mode" "$suite/bin/kernels" "$name::" "$@" || failed=1
    done
    return "$failed"
}

backend() {
    kind "backend $1" env OCTAVO_TESTDATA="$suite/testdata" "$suite/bin/backend" "$1"
}

# A first answer in a minute: the small tests of every kind of kernels, recorded steps, steps that overlap.
smoke() {
    local failed=0
    # Their names begin with small_; kinds without one have nothing to do.
    local name
    for name in $(kernel_kinds); do
        kind "kernels $name (small)" env OCTAVO_GPU=1 "$suite/bin/kernels" "$name::small_" || failed=1
    done
    for name in recorded_decode_steps tokens_are_the_same; do
        backend $name || failed=1
    done
    return "$failed"
}

# Each kernel at the sizes of Qwen3-8B.
bench_kernels() {
    local ceilings
    measured_ceilings
    "$suite/bin/octavo" bench kernels ${OCTAVO_GPU_KERNEL_MODEL:+"$OCTAVO_GPU_KERNEL_MODEL"} --min-time "$min_time" \
        --batch-sizes "$kernel_rows" --contexts "$contexts" --prefill "$prefill" "${ceilings[@]}" \
        --output-json "$out/kernels.json"
}

# The products with the weights of experts at the sizes of Qwen3-30B-A3B. From 65 rows on they are multiplied by tensor cores.
bench_experts() {
    local ceilings folder=$scratch/experts
    measured_ceilings
    mkdir -p "$folder"
    cp "$suite/qwen3-30b-a3b.json" "$folder/config.json"
    "$suite/bin/octavo" bench kernels "${OCTAVO_GPU_EXPERT_MODEL:-$folder}" --filter expert --min-time "$min_time" \
        --batch-sizes "${OCTAVO_GPU_EXPERT_ROWS:-1,8,64,65,256}" --prefill "$prefill" "${ceilings[@]}" \
        --output-json "$out/experts.json"
}

# A folder that holds the shape of Qwen3-8B, and the tokenizer of a test checkpoint.
shape() {
    local folder=$scratch/shape
    mkdir -p "$folder"
    cp "${OCTAVO_GPU_SHAPE:-$suite/qwen3-8b.json}" "$folder/config.json"
    cp "$suite"/testdata/qwen3/tokenizer*.json "$folder/"
    echo "$folder"
}

# What the model of time expects of the same steps, if it knows this GPU. A partition of one is another GPU.
predicted() {
    local chip
    for chip in H200 H100 L40S V100; do
        if grep '^GPU 0' "$out/doctor.log" | grep -v MIG | grep -qw "$chip"; then
            "$suite/bin/octavo" bench roofline "$(shape)" --predict "$chip" --batch-sizes "$batch_sizes" --contexts "$contexts" \
                --prefill "$prefill" --output-json "$out/predicted.json"
            return
        fi
    done
}

# Steps of Qwen3-8B's shape.
roofline() {
    local ceilings
    measured_ceilings
    # shellcheck disable=SC2086 # Flags are words.
    "$suite/bin/octavo" bench roofline "$(shape)" --load-format dummy --device "$device" --batch-sizes "$batch_sizes" \
        --contexts "$contexts" --prefill "$prefill" "${ceilings[@]}" --output-json "$out/roofline.json" \
        ${OCTAVO_GPU_ROOFLINE_FLAGS:-}
    predicted
}

# What the profiler says of the kernels that decide: decode attention of 32 sequences, products of few rows, prefill attention.
ncu() {
    local tool="" candidate failed=0
    for candidate in "$(type -P ncu || true)" /usr/local/cuda*/bin/ncu /opt/nvidia/nsight-compute/*/ncu; do
        [ -x "$candidate" ] && tool=$candidate && break
    done
    [ -n "$tool" ] || skip "no ncu (Nsight Compute)" || return
    profile() {
        local name=$1 kernel=$2
        shift 2
        echo "--- $name"
        "$tool" --clock-control none --set full --force-overwrite -o "$out/ncu-$name" --kernel-name "regex:$kernel" \
            --launch-count 1 "$suite/bin/octavo" bench kernels --min-time 0 "$@" >"$scratch/ncu.log" 2>&1 ||
            { tail -20 "$scratch/ncu.log" && failed=1 && return 0; }
        "$tool" --import "$out/ncu-$name.ncu-rep" --page details || failed=1
    }
    profile decode "^paged_decode" --filter paged_decode --batch-sizes 32 --contexts 4096 --prefill 16
    profile gemv1 "^gemv_.*_m1$" --filter gate_up --batch-sizes 1 --contexts 16 --prefill 16
    profile skinny8 "^gemm_skinny_.*_m8$" --filter gate_up --batch-sizes 8 --contexts 16 --prefill 16
    profile skinny32 "^gemm_skinny_.*_m32$" --filter gate_up --batch-sizes 32 --contexts 16 --prefill 16
    profile prefill "^paged_prefill" --filter paged_prefill --batch-sizes 1 --contexts 16 --prefill 8192
    return "$failed"
}

# Every instance of the manifest against f64, by the tests that run on the emulation elsewhere; then the backend above them: small
# models in each element type, every storage type, the checkpoints of all architectures.
correctness() {
    local failed=0 name
    kernels 1 || failed=1
    # A failure hides nothing of what follows.
    for name in the_contract logits_are_near bits_do_not what_adapters_add quantised_weights greedy_tokens; do
        backend $name || failed=1
    done
    return "$failed"
}

# The kernels of a V100, as PTX that the driver compiles for this chip.
volta() {
    if [ ! -f "$suite/share/octavo/kernels/pack.json" ] || ! grep -q compute_70 "$suite/share/octavo/kernels/pack.json"; then
        echo "the suite has no PTX for sm_70: NVRTC 12 compiles it here; NVRTC 13 knows no sm_70, and compiles for sm_75"
    fi
    kernels volta
}

# Registers and spills of the kernels by this machine's compiler, beside those of the compiler that was tested.
compilers() {
    local chip release
    chip=$(sed -n 's/^GPU 0 .*(\(sm_[0-9a-z]*\),.*/\1/p' "$out/doctor.log")
    release=$(sed -n 's/.*compiled by NVRTC \([0-9.]*\).*/\1/p;s/^NVRTC *\([^ ]*\).*/\1/p' "$out/doctor.log" | head -1)
    [ -n "$release" ] || skip "no NVRTC on this machine" || return
    "$suite/bin/octavo" kernels build --arch "$chip" --output "$scratch/own-pack" ${OCTAVO_GPU_ONLY_KERNELS:+--only "$OCTAVO_GPU_ONLY_KERNELS"}
    cp "$scratch/own-pack/usage.json" "$out/usage-machine.json"
    cp "$scratch/own-pack/pack.json" "$out/pack-machine.json"
    [ -f "$suite/share/octavo/kernels/usage.json" ] || skip "the suite has no kernels to compare with" || return
    cp "$suite/share/octavo/kernels/usage.json" "$out/usage-suite.json"
    cp "$suite/share/octavo/kernels/pack.json" "$out/pack-suite.json"
    python "$here/usage.py" "$out/usage-suite.json" "$out/usage-machine.json"
}

# Puts the words of the command into `sanitizer`: of a toolkit, or of the Python package.
find_sanitizer() {
    local home package
    sanitizer=()
    if command -v compute-sanitizer >/dev/null; then
        sanitizer=(compute-sanitizer)
        return
    fi
    for home in /usr/local/cuda /usr/local/cuda-*; do
        [ -x "$home/bin/compute-sanitizer" ] || continue
        sanitizer=("$home/bin/compute-sanitizer")
        return
    done
    for home in "$(python3 -c 'import sys; print(sys.prefix)' 2>/dev/null)" /usr /usr/local "${HOME:-/root}/.local"; do
        for package in "$home"/lib/python3*/*-packages/nvidia/cuda_sanitizer_api; do
            [ -e "$package/bin/compute-sanitizer" ] || continue
            # The package has it without leave to be executed, and its libraries elsewhere than it looks.
            install "$package/bin/compute-sanitizer" "$scratch/compute-sanitizer"
            sanitizer=("$scratch/compute-sanitizer" --injection-path "$package/lib")
            return
        done
    done
}

# The small tests under the tools of compute-sanitizer.
sanitizer() {
    local tool sanitizer failed=0
    find_sanitizer
    [ ${#sanitizer[@]} -gt 0 ] || skip "no compute-sanitizer (pip install nvidia-cuda-sanitizer-api-cu12)" || return
    for tool in racecheck memcheck initcheck; do
        local begun=$SECONDS verdict=passed
        OCTAVO_GPU=1 "${sanitizer[@]}" --tool "$tool" --error-exitcode 1 \
            "$suite/bin/kernels" --skip machine:: --skip sanitizers:: --skip device:: --test-threads 1 small_ || verdict=failed
        [ "$verdict" = passed ] || failed=1
        echo "--- $tool: $verdict, $((SECONDS - begun)) s"
    done
    return "$failed"
}

# The file of the default model in `model`, with flags: OCTAVO_GPU_MODEL, pieces that came along, or a download.
find_model() {
    local folder name
    # shellcheck disable=SC2206 # A model and its flags are words.
    model=(${OCTAVO_GPU_MODEL:-})
    [ ${#model[@]} -eq 0 ] || return 0
    for folder in "$here"/../gpu-suite-model/* "$here"/model/*; do
        [ ! -d "$folder" ] || cp "$folder"/* "$keep/"
    done
    if [ -f "$suite/model.sha256" ]; then
        name=$(sed -n 's/^[0-9a-f]*  \(.*\.gguf\)$/\1/p' "$suite/model.sha256")
        [ -f "$keep/$name" ] || cat "$keep/$name".part* >"$keep/$name" 2>/dev/null || true
        if (cd "$keep" && sha256sum --status -c <(grep "  $name$" "$suite/model.sha256")); then
            model=("$keep/$name")
            return
        fi
        echo "pieces of the default model in $keep: $(find "$keep" -name '*.part?' | wc -l) of $(grep -c part "$suite/model.sha256")"
        rm -f "$keep/$name"
    fi
    "$suite/bin/octavo" pull || skip "the default model is not here and cannot be fetched (OCTAVO_GPU_MODEL names another)"
}

# Questions and answers of the default model through the socket, alone and several at once.
conversation() {
    local model
    find_model || return
    # shellcheck disable=SC2086 # Flags are words.
    python "$here/conversation.py" --octavo "$suite/bin/octavo" --device "$device" --json "$out/conversation.json" \
        ${OCTAVO_GPU_CONVERSATION_FLAGS:-} "${model[@]}"
}

# The default model's answers and log-probabilities on the GPU and on the processor.
agreement() {
    local model
    find_model || return
    # shellcheck disable=SC2086 # Flags are words.
    python "$here/agreement.py" --octavo "$suite/bin/octavo" --json "$out/agreement.json" \
        ${OCTAVO_GPU_AGREEMENT_FLAGS:-} "${model[@]}"
}

# The steps of `roofline` by PyTorch.
pytorch() {
    python "$here/pytorch.py" --config "${OCTAVO_GPU_SHAPE:-$suite/qwen3-8b.json}" --device "$device" \
        --batch-sizes "$batch_sizes" --contexts "$contexts" --prefill "$prefill" --json "$out/pytorch.json"
}

# As many requests as the server takes, of 1024 tokens in and out, through the socket.
serving() {
    local requests=${OCTAVO_GPU_REQUESTS:-512}
    # shellcheck disable=SC2086 # Flags are words.
    python "$here/serving.py" --octavo "$suite/bin/octavo" --model "$(shape)" --device "$device" --max-num-seqs "$requests" \
        --tokens "${OCTAVO_GPU_TOKENS:-1024}" --requests "$requests" --result-dir "$out" ${OCTAVO_GPU_SERVING_FLAGS:-}
}

"$1"
