"""What the model servers do: traffic, latency, scheduler, cache, processes."""

from grafana import dashboard, heatmap, quantiles, query, row, series, stat, table, variable

# An engine's series have the model's name; those of HTTP and of the process do not.
ENGINE = 'job=~"$job", pod=~"$pod", model_name=~"$model_name"'
SERVER = 'job=~"$job", pod=~"$pod"'
RATE = "$__rate_interval"

VARIABLES = [
    # No expression for All: it must stay a list of the jobs that serve, for http_requests_total is everybody's name.
    variable("job", "Job", "label_values(vllm:num_requests_running, job)"),
    variable(
        "model_name", "Model", 'label_values(vllm:num_requests_running{job=~"$job"}, model_name)', everything=".*"
    ),
    variable("pod", "Pod", 'label_values(vllm:num_requests_running{job=~"$job"}, pod)', everything=".*"),
]


def rate(metric, by="", selector=ENGINE):
    return (
        f"sum by ({by}) (rate({metric}{{{selector}}}[{RATE}]))" if by else f"sum(rate({metric}{{{selector}}}[{RATE}]))"
    )


def ratio(part, whole, by="", selector=ENGINE):
    # Both sides are sums: request_success_total has a label that the token counters lack. Nothing of nothing is no share.
    return f"{rate(part, by, selector)} / ({rate(whole, by, selector)} > 0)"


def p95(metric):
    return f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket{{{ENGINE}}}[{RATE}])))"


def overview():
    failing = f'{SERVER}, status=~"5.."'
    return row(
        "Now",
        stat(
            "Requests", "reqps", rate("vllm:request_success_total"), help="Sequences that ended, whatever the reason."
        ),
        stat(
            "Failing",
            "percentunit",
            f"{rate('http_requests_total', selector=failing)} / ({rate('http_requests_total', selector=SERVER)} > 0)",
            limits=(0.001, 0.01),
            help="Share of HTTP requests answered with a 5xx.",
        ),
        # What is compared with zero is a number: a quantile of no request is none.
        stat("Time to first token, p95", "s", f"{p95('vllm:time_to_first_token_seconds')} >= 0", limits=(1, 10)),
        stat("Time between tokens, p95", "s", f"{p95('vllm:inter_token_latency_seconds')} >= 0", limits=(0.1, 0.2)),
        stat("Running", "short", f"sum(vllm:num_requests_running{{{ENGINE}}})"),
        stat("Waiting", "short", f"sum(vllm:num_requests_waiting{{{ENGINE}}})", limits=(10, 50)),
        stat("Generated", "suffix: tok/s", rate("vllm:generation_tokens_total")),
        stat("Prompts", "suffix: tok/s", rate("vllm:prompt_tokens_total")),
        stat("KV cache", "percentunit", f"max(vllm:kv_cache_usage_perc{{{ENGINE}}})", limits=(0.9, 0.95), top=1),
        stat(
            "Prefix cache hits", "percentunit", ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        ),
        stat("Preemptions", "ops", rate("vllm:num_preemptions_total"), limits=(0.1, 1)),
        stat("Replicas up", "short", f"sum(up{{{SERVER}}})"),
    )


def traffic():
    seen = rate("http_requests_total", "status", SERVER)
    refused = f"sum by (reason) (rate(vllm:admission_rejections_total{{{ENGINE}}}[{RATE}]))"
    return row(
        "Traffic",
        series(
            "Ended requests by reason",
            "reqps",
            query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
            help="stop and length are good ends; abort is the client's or the proxy's, error ours.",
        ),
        series("HTTP answers by status", "reqps", query(seen, "{{status}}")),
        series("HTTP answers by route", "reqps", query(rate("http_requests_total", "handler", SERVER), "{{handler}}")),
        series(
            "Tokens",
            "suffix: tok/s",
            query(rate("vllm:generation_tokens_total", "pod"), "{{pod}} generated"),
            query(rate("vllm:prompt_tokens_total", "pod"), "{{pod}} prompt"),
        ),
        series(
            "Refused for a full queue", "reqps", query(refused, "{{reason}}"), help="Answered 429, with Retry-After."
        ),
        series(
            "Bytes",
            "Bps",
            query(rate("http_request_size_bytes_sum", selector=SERVER), "received"),
            query(rate("http_response_size_bytes_sum", selector=SERVER), "sent"),
        ),
    )


def latency():
    parts = [("queue", "queue"), ("prefill", "prefill"), ("decode", "decode"), ("inference", "prefill and decode")]
    phases = [query(p95(f"vllm:request_{part}_time_seconds"), legend) for part, legend in parts]
    http = (
        f"histogram_quantile(0.95, sum by (le) (rate(http_request_duration_highr_seconds_bucket{{{SERVER}}}[{RATE}])))"
    )
    return row(
        "Latency",
        quantiles("Time to first token", "vllm:time_to_first_token_seconds", "pod", ENGINE),
        quantiles("Time between tokens", "vllm:inter_token_latency_seconds", "pod", ENGINE, (0.5, 0.95, 0.99)),
        quantiles("End to end", "vllm:e2e_request_latency_seconds", "pod", ENGINE),
        heatmap("Time to first token", "vllm:time_to_first_token_seconds", ENGINE),
        heatmap("Time between tokens", "vllm:inter_token_latency_seconds", ENGINE),
        series("Where the time goes, p95", "s", *phases, help="Of the requests that ended."),
        quantiles("Time per output token", "vllm:request_time_per_output_token_seconds", "pod", ENGINE, (0.5, 0.95)),
        series("HTTP, first byte of the request to the last of the answer, p95", "s", query(http, "all routes")),
        heatmap("End to end", "vllm:e2e_request_latency_seconds", ENGINE),
    )


def scheduler():
    step = ratio("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count", "pod")
    waiting = f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{ENGINE}}})"
    return row(
        "Scheduler",
        series(
            "Requests in the engine",
            "short",
            query(f"sum by (pod) (vllm:num_requests_running{{{ENGINE}}})", "{{pod}} running"),
            query(f"sum by (pod) (vllm:num_requests_waiting{{{ENGINE}}})", "{{pod}} waiting"),
        ),
        series("Waiting by reason", "short", query(waiting, "{{reason}}")),
        series("Steps", "ops", query(rate("vllm:iteration_tokens_total_count", "pod"), "{{pod}}")),
        series("Tokens of a step, mean", "short", query(step, "{{pod}}")),
        heatmap("Tokens of a step", "vllm:iteration_tokens_total", ENGINE, "short"),
        series(
            "Preemptions",
            "ops",
            query(rate("vllm:num_preemptions_total", "pod"), "{{pod}}"),
            help="A preempted request loses its KV blocks and is computed again.",
        ),
    )


def cache():
    sources = rate("vllm:prompt_tokens_by_source_total", "source")
    hits = ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "pod")
    return row(
        "KV cache",
        series("Blocks in use", "percentunit", query(f"vllm:kv_cache_usage_perc{{{ENGINE}}}", "{{pod}}"), top=1),
        series(
            "Prefix cache hits", "percentunit", query(hits, "{{pod}}"), top=1, help="Share of the tokens looked up."
        ),
        series("Prompt tokens by source", "suffix: tok/s", query(sources, "{{source}}")),
        table(
            "Configuration",
            [
                (
                    "Replicas",
                    "short",
                    f"count by (job, block_size, num_gpu_blocks, kv_cache_size_tokens, cache_dtype,"
                    f" enable_prefix_caching) (vllm:cache_config_info{{{SERVER}}})",
                )
            ],
            rename={
                "job": "Job",
                "block_size": "Tokens a block",
                "num_gpu_blocks": "Blocks",
                "kv_cache_size_tokens": "Tokens",
                "cache_dtype": "Type",
                "enable_prefix_caching": "Prefix caching",
            },
            width=24,
            height=5,
        ),
    )


def device():
    flops, busy = "vllm:estimated_flops_per_gpu_total", "octavo_step_busy_seconds_sum"
    read, written = "vllm:estimated_read_bytes_per_gpu_total", "vllm:estimated_write_bytes_per_gpu_total"
    moved = f"{rate(read, 'pod')} + {rate(written, 'pod')}"
    return row(
        "Steps on the device",
        series(
            "Busy with steps",
            "percentunit",
            # The rate of a counter that is extrapolated may be a little more.
            query(f"clamp_max({rate(busy, 'pod')}, 1)", "{{pod}}"),
            top=1,
            help="Share of the time. The rest is waiting for requests, or for the engine.",
        ),
        series(
            "Bytes moved while busy, by the model",
            "Bps",
            query(f"({moved}) / {rate(busy, 'pod')}", "{{pod}}"),
            help="Weights, keys, values and activations of the steps. Shares of a GPU's limits are on its own dashboard.",
        ),
        series(
            "FLOP/s while busy, by the model",
            "flops",
            query(f"{rate(flops, 'pod')} / {rate(busy, 'pod')}", "{{pod}}"),
        ),
    )


def lengths():
    ends = "vllm:request_success_total"
    return row(
        "Lengths",
        series(
            "Tokens per request",
            "short",
            query(ratio("vllm:prompt_tokens_total", ends, "pod"), "{{pod}} prompt"),
            query(ratio("vllm:generation_tokens_total", ends, "pod"), "{{pod}} generated"),
        ),
        quantiles("Prompt", "vllm:request_prompt_tokens", "pod", ENGINE, (0.5, 0.95), "short"),
        quantiles("Generated", "vllm:request_generation_tokens", "pod", ENGINE, (0.5, 0.95), "short"),
        quantiles("max_tokens asked for", "vllm:request_params_max_tokens", "pod", ENGINE, (0.5, 0.95), "short"),
        quantiles(
            "Prompt tokens computed", "vllm:request_prefill_kv_computed_tokens", "pod", ENGINE, (0.5, 0.95), "short"
        ),
        quantiles("Preemptions of a request", "vllm:request_num_preemptions", "pod", ENGINE, (0.95, 0.99), "short"),
    )


def keys():
    refused = f"sum by (key_name, limit) (rate(octavo_key_rejections_total{{{SERVER}}}[{RATE}]))"
    return row(
        "API keys",
        series(
            "Requests by key",
            "reqps",
            query(rate("octavo_key_requests_total", "key_name", SERVER), "{{key_name}}"),
            help="Refused requests included. Only keys of --api-keys-file are counted.",
        ),
        series(
            "Refused by a limit of the key",
            "reqps",
            query(refused, "{{key_name}} {{limit}}"),
            help="Answered 429. Each replica counts for itself.",
        ),
        series(
            "Tokens by key",
            "suffix: tok/s",
            query(rate("octavo_key_generation_tokens_total", "key_name", SERVER), "{{key_name}} generated"),
            query(rate("octavo_key_prompt_tokens_total", "key_name", SERVER), "{{key_name}} prompt"),
        ),
    )


def processes():
    age = f"time() - process_start_time_seconds{{{SERVER}}}"
    files = f"process_open_fds{{{SERVER}}} / process_max_fds{{{SERVER}}}"
    return row(
        "Processes",
        series("Resident memory", "bytes", query(f"process_resident_memory_bytes{{{SERVER}}}", "{{pod}}")),
        series("Processors in use", "short", query(rate("process_cpu_seconds_total", "pod", SERVER), "{{pod}}")),
        series("Age", "s", query(age, "{{pod}}"), help="A saw tooth is a rollout or a crash loop."),
        series("Scrapes that succeed", "short", query(f"up{{{SERVER}}}", "{{pod}}"), top=1),
        series("Time of a scrape", "s", query(f"scrape_duration_seconds{{{SERVER}}}", "{{pod}}")),
        series("File descriptors in use", "percentunit", query(files, "{{pod}}"), top=1),
        table(
            "Builds",
            [("Replicas", "short", f"count by (job, version, revision, backend, device) (octavo_build_info{{{SERVER}}})")],
            rename={
                "job": "Job",
                "version": "Version",
                "revision": "Revision",
                "backend": "Backend",
                "device": "Device",
            },
            width=24,
            height=5,
            help="More than one line while a rollout goes on. vLLM's pods do not tell.",
        ),
    )


def board():
    """The dashboard."""
    return dashboard(
        "octavo-application",
        "Octavo: application",
        "Traffic, latency, scheduler and cache of the model servers. The metrics are vLLM's: its pods show here too.",
        VARIABLES,
        overview(),
        traffic(),
        latency(),
        scheduler(),
        cache(),
        device(),
        lengths(),
        keys(),
        processes(),
    )
