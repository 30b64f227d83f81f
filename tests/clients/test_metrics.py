"""The metrics page as Prometheus' own Python client reads it."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(base_url):
    with urllib.request.urlopen(f"{base_url}/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


STARRED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:request_success": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
}


def test_every_starred_metric_is_there(base_url):
    families = scrape(base_url)
    assert {name: families[name].type for name in STARRED if name in families} == STARRED
    for name in STARRED:
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "default" and sample.labels["engine"] == "0"
    ends = {s.labels["finished_reason"] for s in families["vllm:request_success"].samples}
    assert ends == {"stop", "length", "abort", "error", "repetition"}
    buckets = {s.labels["le"] for s in families["vllm:time_to_first_token_seconds"].samples if "le" in s.labels}
    assert {"0.001", "1.0", "2560.0", "+Inf"} <= buckets
