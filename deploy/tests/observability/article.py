"""The queries of the reference architecture's two dashboards, with the units of their panels.

An operator's panels must go on showing what they showed, so these are the expressions as they are asked there.
"""

POD = "by (le, pod)"


def p(quantile, metric, by=POD):
    return f"histogram_quantile({quantile}, sum(rate(vllm:{metric}_bucket[5m])) {by})"


def increase(metric):
    return f"sum(increase(vllm:{metric}[1h]))"


GPU = "{namespace='gpu-operator'}"

APPLICATION = [
    ("reqps", "sum(rate(vllm:request_success_total[1m])) by (pod)"),
    ("short", "vllm:num_requests_running"),
    ("short", "vllm:num_requests_waiting"),
    *[("s", p(q, "time_to_first_token_seconds")) for q in ("0.50", "0.95", "0.99")],
    *[("s", p(q, "e2e_request_latency_seconds")) for q in ("0.50", "0.95", "0.99")],
    ("tps", "sum(rate(vllm:generation_tokens_total[1m])) by (pod)"),
    ("tps", "sum(rate(vllm:prompt_tokens_total[1m])) by (pod)"),
    ("percent", "vllm:kv_cache_usage_perc * 100"),
    ("percent", "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]) * 100"),
    ("s", p("0.95", "request_queue_time_seconds")),
    ("s", p("0.95", "request_prefill_time_seconds")),
    ("s", p("0.95", "request_decode_time_seconds")),
    *[("s", p(q, "inter_token_latency_seconds")) for q in ("0.50", "0.95")],
    ("ops", "rate(vllm:num_preemptions_total[5m])"),
    ("reqps", "sum(rate(vllm:request_success_total[5m]))"),
    ("s", p("0.95", "time_to_first_token_seconds", "by (le)")),
    ("short", "sum(vllm:num_requests_running)"),
    ("short", "sum(vllm:num_requests_waiting)"),
    ("percent", "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m])) * 100"),
    ("percent", "avg(vllm:kv_cache_usage_perc) * 100"),
    ("short", increase("request_success_total")),
    ("short", increase("generation_tokens_total")),
    ("short", increase("prompt_tokens_cached_total")),
    ("short", increase("num_preemptions_total")),
    ("short", "vllm:num_requests_running"),
    ("short", "vllm:num_requests_waiting"),
    ("reqps", "rate(vllm:request_success_total[5m])"),
    ("percent", "vllm:kv_cache_usage_perc * 100"),
    ("s", "histogram_quantile(0.95, rate(vllm:time_to_first_token_seconds_bucket[5m]))"),
]

# Empty with vLLM too: request_success_total has a label, finished_reason, that the other side lacks.
EMPTY = [
    "rate(vllm:generation_tokens_total[5m]) / rate(vllm:request_success_total[5m])",
    "rate(vllm:prompt_tokens_total[5m]) / rate(vllm:request_success_total[5m])",
]

HARDWARE = [
    ("percent", f"DCGM_FI_DEV_GPU_UTIL{GPU}"),
    ("decgbytes", f"DCGM_FI_DEV_FB_USED{GPU} / 1024"),
    ("decgbytes", f"DCGM_FI_DEV_FB_FREE{GPU} / 1024"),
    ("celsius", f"DCGM_FI_DEV_GPU_TEMP{GPU}"),
    ("watt", f"DCGM_FI_DEV_POWER_USAGE{GPU}"),
    ("percent", "100 - (avg by (instance) (rate(node_cpu_seconds_total{mode='idle'}[5m])) * 100)"),
    (
        "percent",
        "(node_memory_MemTotal_bytes - node_memory_MemAvailable_bytes) / node_memory_MemTotal_bytes * 100",
    ),
    ("percent", f"avg(DCGM_FI_DEV_GPU_UTIL{GPU})"),
    ("celsius", f"avg(DCGM_FI_DEV_GPU_TEMP{GPU})"),
    ("decgbytes", f"sum(DCGM_FI_DEV_FB_USED{GPU}) / 1024"),
    ("watt", f"sum(DCGM_FI_DEV_POWER_USAGE{GPU})"),
    ("percent", f"DCGM_FI_DEV_GPU_UTIL{GPU}"),
    ("celsius", f"DCGM_FI_DEV_GPU_TEMP{GPU}"),
    ("decgbytes", f"DCGM_FI_DEV_FB_USED{GPU} / 1024"),
    ("watt", f"DCGM_FI_DEV_POWER_USAGE{GPU}"),
    ("Bps", "rate(node_network_receive_bytes_total{device!~'lo'}[5m])"),
    ("Bps", "rate(node_network_transmit_bytes_total{device!~'lo'}[5m])"),
    ("Bps", "rate(node_disk_read_bytes_total[5m])"),
    ("Bps", "rate(node_disk_written_bytes_total[5m])"),
]
