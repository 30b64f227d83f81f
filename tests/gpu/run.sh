#!/usr/bin/env bash
# Runs what only a GPU can show: tests/gpu/run.sh [SLOT | PART]... README.md describes slots and parts.
#
# Results are crash-safe. Each part writes to a work folder as it goes, and everything in that folder is packed into one archive after
# each part, every few seconds while a part runs, and at the end, whatever the end is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

# Parts of each slot, the most information per second first, with the most seconds that each may take. The last part of a slot takes
# what the others left.
slot1=(limits:30 smoke:75 bench_kernels:150 roofline:150 ncu:70 correctness:540)
slot2=(compilers:60 bench_experts:40 sanitizer:200 volta:180 correctness:540)
slot3=(conversation:75 agreement:90 serving:180 pytorch:540)
# Seconds of a slot, and of any part of it.
slot_limit=${OCTAVO_GPU_SLOT_LIMIT:-540}
part_limit=${OCTAVO_GPU_PART_LIMIT:-540}
# What outlives a slot on the same machine: pieces of the model, the kinds of tests that passed.
keep=${OCTAVO_GPU_KEEP:-${TMPDIR:-/tmp}/octavo-gpu-keep}
# Seconds between two archives while a part runs.
pack_every=${OCTAVO_GPU_PACK_EVERY:-10}
# Bytes of an archive.
archive_limit=${OCTAVO_GPU_ARCHIVE_LIMIT:-$((16 << 20))}
# Automake's exit status of a test that cannot run here. The part says why.
skipped=77

# ------------------------------------------------------------------------------------------- the programs

# The folder of the programs: a copy of the suite as build.sh packs it, the one in target/, or any that has them.
suite=${OCTAVO_GPU_SUITE:-}
find_suite() {
    [ -z "$suite" ] || return 0
    local folder payload
    for folder in "$here" "$root/target/gpu-suite"; do
        [ -f "$folder/bin/octavo" ] && suite=$folder && return
        payload=$folder/payload.tar.xz
        [ -f "$payload" ] || continue
        suite=${TMPDIR:-/tmp}/octavo-gpu-suite-$(sha256sum "$payload" | head -c 16)
        if [ ! -f "$suite/COMMIT" ]; then
            mkdir -p "$suite"
            # Not every tar has xz beside it; every Python has.
            tar -xJf "$payload" -C "$suite" 2>/dev/null || python3 -m tarfile -e "$payload" "$suite"
        fi
        return
    done
    command -v cargo >/dev/null || { echo "no programs beside run.sh: build.sh makes them on a machine with cargo" >&2 && exit 2; }
    "$here/build.sh"
    find_suite
}

# ------------------------------------------------------------------------------------------- the run

all=("${slot1[@]}" "${slot2[@]}" "${slot3[@]}")
# The most seconds of a part.
limit_of() {
    local entry
    for entry in "${all[@]}"; do
        [ "${entry%:*}" != "$1" ] || { echo "${entry#*:}" && return; }
    done
    return 1
}
# As SLOT:PART; a part that is named by itself is its own slot.
parts=() label=""
[ $# -gt 0 ] || set -- slot1 slot2 slot3
for word in "$@"; do
    case $word in
        slot1) parts+=("${slot1[@]/#/slot1:}") ;;
        slot2) parts+=("${slot2[@]/#/slot2:}") ;;
        slot3) parts+=("${slot3[@]/#/slot3:}") ;;
        *)
            if ! limit_of "$word" >/dev/null; then
                echo "no slot or part is called $word: there are slot1 slot2 slot3" \
                    "$(printf '%s\n' "${all[@]%:*}" | awk '!seen[$0]++' | paste -sd' ')" >&2
                exit 2
            fi
            parts+=("$word:$word:")
            ;;
    esac
    label+=${label:+-}$word
done

find_suite
# Programs of a copy may have lost the permission to be executed.
chmod +x "$suite"/bin/* 2>/dev/null || true
export OCTAVO_GPU_SUITE=$suite OCTAVO_GPU_KEEP=$keep
# Kernels come from the suite's pack, so that what runs is what was checked.
[ ! -f "$suite/share/octavo/kernels/pack.json" ] || export OCTAVO_KERNEL_PACK=$suite/share/octavo/kernels
doctor=$("$suite/bin/octavo" doctor) || { echo "octavo doctor fails: $doctor" >&2 && exit 1; }
gpu=$(sed -n 's/^GPU 0 *//p' <<<"$doctor")
if [ -z "$gpu" ]; then
    echo "skipped: no GPU ($(sed -n 's/^GPU *none: //p' <<<"$doctor"))"
    exit 0
fi

commit=$(cat "$suite/COMMIT")
date=$(date -u +%F)
name=$date-$commit-$(sed 's/ (.*//; s/[^[:alnum:]]/-/g' <<<"${gpu#NVIDIA }" | tr '[:upper:]' '[:lower:]')-$label
results=${OCTAVO_GPU_RESULTS:-$root/benches/results/gpu}
[ -d "$results" ] || results=$PWD
mkdir -p "$keep"
scratch=$(mktemp -d)
out=$scratch/$name
mkdir -p "$out"
export OCTAVO_GPU_OUT=$out OCTAVO_GPU_SCRATCH=$scratch
echo "$doctor" >"$out/doctor.log"
echo "commit $commit, $date, $gpu; results in $results/$name.tar.gz"

json="" table="" status=0

# Writes the parts that ended, and the one that runs, if one does.
write_summary() {
    local running=${1:+$(printf '{"part": "%s", "result": "running", "seconds": %d}' "$1" "$((SECONDS - begun))")}
    local entries=$json${json:+${running:+, }}$running
    printf '{"commit": "%s", "date": "%s", "gpu": "%s", "slots": "%s", "parts": [%s]}\n' \
        "$commit" "$date" "$gpu" "$label" "$entries" >"$out/.summary"
    mv "$out/.summary" "$out/summary.json"
}

# Packs the work folder. Reports of the profiler, and then the beginnings of long logs, are left out of an archive that is too large.
pack() {
    local draft=$results/.$name.$BASHPID
    tar -czf "$draft" -C "$scratch" --exclude '.*' "$name" 2>/dev/null || true
    if [ "$(stat -c %s "$draft")" -gt "$archive_limit" ]; then
        rm -rf "$scratch/small" && cp -r "$out" "$scratch/small"
        find "$scratch/small" -name '*.ncu-rep' -delete
        find "$scratch/small" -name '*.log' -size +512k | while read -r log; do
            tail -c 256K "$log" >"$log.end" && mv "$log.end" "$log"
        done
        tar -czf "$draft" -C "$scratch" --transform "s|^small|$name|" small
    fi
    mv "$draft" "$results/$name.tar.gz"
}

packer="" child=""
# shellcheck disable=SC2329 # A trap calls it.
finish() {
    local code=$?
    trap - EXIT INT TERM
    [ -z "$child" ] || kill -KILL -- "-$child" 2>/dev/null || true
    [ -z "$packer" ] || kill "$packer" 2>/dev/null || true
    pack
    rm -rf "$scratch" "$results/.$name".*
    exit "$code"
}
trap finish EXIT
write_summary
pack
trap 'exit 130' INT
trap 'exit 143' TERM

# While a part runs, the archive follows it.
begun=$SECONDS
(
    trap - EXIT INT TERM
    while sleep "$pack_every"; do pack; done
) &
packer=$!

slot="" slot_begun=$SECONDS
for entry in "${parts[@]}"; do
    part=${entry#*:} part=${part%%:*}
    if [ "$slot" != "${entry%%:*}" ]; then
        slot=${entry%%:*} slot_begun=$SECONDS
        [ "$slot" != slot2 ] || export OCTAVO_GPU_SKIP_PASSED=1
    fi
    echo "=== $part"
    begun=$SECONDS code=0 verdict=""
    limit=$(limit_of "$part")
    for most in $((slot_limit - (SECONDS - slot_begun))) "$part_limit"; do
        [ "$most" -ge "$limit" ] || limit=$most
    done
    if [ "$limit" -lt 1 ]; then
        verdict="not run: no time was left"
    else
        write_summary "$part"
        pack
        setsid timeout -k 5 "$limit" bash "$here/parts.sh" "$part" >"$out/$part.log" 2>&1 &
        child=$!
        tail -n +1 -s 0.1 -f --pid=$child "$out/$part.log" 2>/dev/null || true
        wait $child || code=$?
        child=""
        case $code in
            0) verdict=passed ;;
            "$skipped") verdict=skipped ;;
            124 | 137) verdict="cut off after $limit s" status=1 ;;
            *) verdict=failed status=1 ;;
        esac
    fi
    seconds=$((SECONDS - begun))
    json+=${json:+, }$(printf '{"part": "%s", "result": "%s", "seconds": %d}' "$part" "$verdict" $seconds)
    table+=$(printf '\n%-14s %-26s %4d s' "$part" "$verdict" $seconds)
    write_summary
    pack
done
echo "=== summary$table"
if command -v python3 >/dev/null; then
    python3 "$here/report.py" "$out" >"$out/page.md" && cp "$out/page.md" "$results/$name.md" && cat "$out/page.md"
fi
exit $status
