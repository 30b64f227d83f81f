#!/usr/bin/env bash
# What only a GPU can show, in parts of at most ten minutes each: tests/gpu/run.sh [PART...]. README.md says what the parts show.
# Programs come from target/gpu-suite, where build.sh puts them, or lie beside this script in a copy of that folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
suite=${OCTAVO_GPU_SUITE:-$here}
[ -f "$suite/octavo" ] || suite=$root/target/gpu-suite
# A copy may have lost what it was allowed to.
for program in octavo kernels backend; do
    [ ! -f "$suite/$program" ] || [ -x "$suite/$program" ] || chmod +x "$suite/$program"
done
parts=(correctness volta sanitizer agreement roofline pytorch serving)
# Of a part, in seconds.
limit=${OCTAVO_GPU_LIMIT:-600}
# As automake has it: a part that cannot be run here, and says why.
skipped=77

# The tests of kernels but those that are about the emulation.
kernels() {
    OCTAVO_GPU=$1 "$suite/kernels" --skip machine:: --skip sanitizers:: --skip layout:: --skip device::
}

skip() {
    echo "skipped: $*"
    return "$skipped"
}

# Every instance of the manifest against f64, by the tests that run on the emulation elsewhere; then the backend above them: small
# models in each element type, every storage type, recorded steps, the checkpoints of all architectures.
correctness() {
    local failed=0
    kernels 1 || failed=1
    # Whatever came of them: what fails first is not all there is to know.
    OCTAVO_TESTDATA=$suite/testdata "$suite/backend" || failed=1
    return $failed
}

# What a V100 is given, as PTX that the driver makes code of for this chip.
volta() {
    kernels volta
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
            copy=$(mktemp)
            trap 'rm -f "$copy"' EXIT
            install "$package/bin/compute-sanitizer" "$copy"
            sanitizer=("$copy" --injection-path "$package/lib")
            return
        done
    done
}

# The small tests under each tool of compute-sanitizer.
sanitizer() {
    local tool sanitizer failed=0
    find_sanitizer
    [ ${#sanitizer[@]} -gt 0 ] || skip "no compute-sanitizer (pip install nvidia-cuda-sanitizer-api-cu12)" || return
    for tool in memcheck racecheck initcheck; do
        echo "--- $tool"
        OCTAVO_GPU=1 "${sanitizer[@]}" --tool "$tool" --error-exitcode 1 \
            "$suite/kernels" --skip machine:: --skip sanitizers:: --skip device:: --test-threads 1 small_ || failed=1
    done
    return $failed
}

python() {
    command -v python3 >/dev/null || skip "no python3" || return
    python3 "$@"
}

# The default model's answers and log-probabilities on the GPU and on the processor.
agreement() {
    if [ -z "${OCTAVO_GPU_MODEL:-}" ] && ! "$suite/octavo" pull; then
        skip "the default model cannot be fetched here (OCTAVO_GPU_MODEL names another)" || return
    fi
    # shellcheck disable=SC2086 # A model and its flags are words.
    python "$here/agreement.py" --octavo "$suite/octavo" --json "$out/agreement.json" ${OCTAVO_GPU_MODEL:-}
}

# A folder that holds the shape of Qwen3-8B, and the tokenizer of a test checkpoint.
shape() {
    local folder=$out/shape
    mkdir -p "$folder"
    cp "${OCTAVO_GPU_SHAPE:-$suite/qwen3-8b.json}" "$folder/config.json"
    cp "$suite"/testdata/qwen3/tokenizer*.json "$folder/"
    echo "$folder"
}

batch_sizes=${OCTAVO_GPU_BATCH_SIZES:-1,8,32,128,256}
contexts=${OCTAVO_GPU_CONTEXTS:-1024,4096}
prefill=${OCTAVO_GPU_PREFILL:-512,2048,8192}
device=${OCTAVO_GPU_DEVICE:-cuda}

# Steps of Qwen3-8B's shape against what the chip could do at most.
roofline() {
    "$suite/octavo" bench roofline "$(shape)" --load-format dummy --device "$device" --batch-sizes "$batch_sizes" \
        --contexts "$contexts" --prefill "$prefill" --output-json "$out/roofline.json"
}

# The same steps by PyTorch.
pytorch() {
    python "$here/pytorch.py" --config "${OCTAVO_GPU_SHAPE:-$suite/qwen3-8b.json}" --device "$device" \
        --batch-sizes "$batch_sizes" --contexts "$contexts" --prefill "$prefill" --json "$out/pytorch.json"
}

# As many requests as the server takes, of 1024 tokens in and out, through the socket.
serving() {
    local requests=${OCTAVO_GPU_REQUESTS:-512}
    python "$here/serving.py" --octavo "$suite/octavo" --model "$(shape)" --device "$device" --max-num-seqs "$requests" \
        --tokens "${OCTAVO_GPU_TOKENS:-1024}" --requests "$requests" --result-dir "$out"
}

# ------------------------------------------------------------------------------------------- the whole

# One part in a process of its own, so that a time limit ends all of it.
if [ "${1:-}" = --only ]; then
    out=$OCTAVO_GPU_OUT
    case $2 in
        correctness) correctness ;;
        volta) volta ;;
        sanitizer) sanitizer ;;
        agreement) agreement ;;
        roofline) roofline ;;
        pytorch) pytorch ;;
        serving) serving ;;
    esac
    exit
fi

[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
    case " ${parts[*]} " in
        *" $part "*) ;;
        *) echo "no part is called $part: there are ${parts[*]}" >&2 && exit 2 ;;
    esac
done
if [ ! -x "$suite/octavo" ]; then
    command -v cargo >/dev/null || { echo "no programs in $suite: build.sh makes them on a machine with cargo" >&2 && exit 2; }
    "$here/build.sh"
fi
doctor=$("$suite/octavo" doctor) || { echo "octavo doctor fails: $doctor" >&2 && exit 1; }
gpu=$(sed -n 's/^GPU 0 *//p' <<<"$doctor")
if [ -z "$gpu" ]; then
    echo "skipped: no GPU ($(sed -n 's/^GPU *none: //p' <<<"$doctor"))"
    exit 0
fi

commit=$(cat "$suite/COMMIT")
date=$(date -u +%F)
name=$date-$commit-$(sed 's/ (.*//; s/[^[:alnum:]]/-/g' <<<"${gpu#NVIDIA }" | tr '[:upper:]' '[:lower:]')
results=${OCTAVO_GPU_RESULTS:-$root/benches/results/gpu}
[ -d "$results" ] || results=$PWD
out=$results/$name
mkdir -p "$out"
echo "$doctor" >"$out/doctor.log"
echo "commit $commit, $date, $gpu; results in $out"

json="" table="" status=0
for part in "$@"; do
    echo "=== $part"
    begun=$SECONDS code=0
    OCTAVO_GPU_OUT=$out timeout -k 10 "$limit" bash "$here/run.sh" --only "$part" 2>&1 | tee "$out/$part.log" || code=${PIPESTATUS[0]}
    case $code in
        0) verdict=passed ;;
        "$skipped") verdict=skipped ;;
        124 | 137) verdict="cut off after $limit s" status=1 ;;
        *) verdict=failed status=1 ;;
    esac
    json+=${json:+, }$(printf '{"part": "%s", "result": "%s", "seconds": %d}' "$part" "$verdict" $((SECONDS - begun)))
    table+=$(printf '\n%-12s %-24s %4d s' "$part" "$verdict" $((SECONDS - begun)))
done
printf '{"commit": "%s", "date": "%s", "gpu": "%s", "parts": [%s]}\n' "$commit" "$date" "$gpu" "$json" >"$out/summary.json"
rm -rf "$out/shape"
echo "=== summary$table"
if command -v python3 >/dev/null; then
    python3 "$here/report.py" "$out"
fi
exit $status
