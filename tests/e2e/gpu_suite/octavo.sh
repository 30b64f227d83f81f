#!/usr/bin/env bash
# Stands in for octavo in the tests of tests/gpu/run.sh: answers each command at once with files of the right form. The commands that
# begin as the pattern BREAK crash or hang (HOW) after they have written their first figures.
command="$(basename "$0") $* ${OCTAVO_GPU:+on $OCTAVO_GPU}"
file=""
while [ $# -gt 0 ]; do
    case $1 in --output-json | --output) file=$2 ;; esac
    shift
done
figures() {
    [ -z "$file" ] || printf '%s\n' "$1" >"$file"
}
broken() {
    [ -n "${BREAK:-}" ] && [[ "$command" == $BREAK* ]] || return 0
    echo "first figures of $command"
    [ "$HOW" != hang ] || exec sleep 20
    kill -SEGV $$
}
case $command in
    "octavo doctor"*)
        echo "GPU 0                    Emulated H200 (sm_90a, 1.00 GiB)"
        echo "NVRTC                    /lib/libnvrtc.so.13"
        ;;
    "octavo bench limits"*)
        broken
        figures '{"device": "Emulated H200", "bandwidth_bytes_per_second": 4.3e12, "product_size": 8192, "stated": {"bandwidth_bytes_per_second": 4.8e12, "flops_per_second": 989.5e12},
            "products": [{"dtype": "bfloat16", "flops_per_second": 780e12}, {"dtype": "float16", "error": "refused: 15"}]}'
        ;;
    "octavo bench kernels"*)
        kernel() { printf '{"kernel": "%s", "on": "%s", "seconds": %s, "bound_seconds": %s, "fraction_of_bound": 0.5}' "$@"; }
        attention=$(kernel paged_decode_bf16_d128_g8 "8 sequences of 1024 tokens" 4e-5 1e-5)
        figures "{\"layers\": 36, \"complete\": false, \"kernels\": [$attention]}"
        broken
        refused='{"kernel": "cublasLt", "on": "qkv 6144x4096, 32 rows", "error": "refused: 15"}'
        product=$(kernel gemv_bf16_m8 "qkv 6144x4096, 8 rows" 2e-5 1.8e-5)
        figures "{\"layers\": 36, \"complete\": true, \"kernels\": [$attention, $product, $refused]}"
        ;;
    "octavo bench roofline"*)
        step='{"kind": "decode", "sequences": 8, "context": 1024, "seconds": 5e-3, "bound_seconds": 3.5e-3, "fraction_of_bound": 0.7, "fraction_of_ceiling": 0.8}'
        figures "{\"limits\": null, \"complete\": false, \"steps\": [$step]}"
        broken
        figures "{\"limits\": null, \"complete\": true, \"steps\": [$step, {\"kind\": \"prefill\", \"tokens\": 2048, \"error\": \"it does not fit\"}]}"
        ;;
    "octavo kernels build"*)
        broken
        mkdir -p "$file"
        echo '{"sm_90a-gemv_bf16_m8-0123-13.0.cubin": {"registers": 104, "spills": 8}}' >"$file/usage.json"
        echo '{"chips": {"sm_90a": {"nvrtc": "13.0"}}}' >"$file/pack.json"
        ;;
    "octavo serve"*)
        broken
        exit 1
        ;;
    "kernels --list"*)
        printf '%s: test\n' attention::small_attention linear::products rows::small_rows machine::fibers
        ;;
    "kernels "* | "backend "*)
        broken
        echo "test ${command#* } ... ok"
        ;;
    "ncu "* | "compute-sanitizer "*)
        broken
        ;;
esac
