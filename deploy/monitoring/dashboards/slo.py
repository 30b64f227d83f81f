"""The service-level objectives: what recording.yaml computes, and what is left of the error budgets."""

from application import VARIABLES as APPLICATION
from grafana import dashboard, query, row, series, stat

JOB = 'job=~"$job"'
HANDLERS = 'handler=~"/v1/(chat/completions|completions|responses|messages|embeddings|score|rerank)|/v2/(embed|rerank)|/pooling|/classify|/score|/rerank|/generate|/invocations"'
WINDOWS = ("5m", "30m", "1h", "6h")
# What the alerts fire at; their rules pair the hour with five minutes and six hours with half an hour.
FAST, SLOW = 14.4, 6

VARIABLES = [variable for variable in APPLICATION if variable["name"] == "job"]


def budget(slo):
    return f'scalar(octavo:error_budget:ratio{{slo="{slo}"}})'


def objective(title, slo, failing, recorded, labels):
    """A row of panels; `failing` is the share of bad requests over the dashboard's time range."""
    burn = [query(f"{recorded}{w}{{{JOB}}} / {budget(slo)}", f"{labels} {w}") for w in WINDOWS]
    ratio = [query(f"{recorded}{w}{{{JOB}}}", f"{labels} {w}") for w in ("5m", "1h")]
    return row(
        title,
        stat("Objective", "percentunit", f"1 - {budget(slo)}", decimals=2, width=6),
        stat("Met, over the time range", "percentunit", f"1 - ({failing})", decimals=3, width=6),
        stat(
            "Budget left, over the time range", "percentunit", f"1 - ({failing}) / {budget(slo)}", decimals=1, width=6
        ),
        stat(
            "Burn rate, one hour", "short", f"max({recorded}1h{{{JOB}}} >= 0) / {budget(slo)}", limits=(SLOW, FAST), width=6
        ),
        series(
            "Burn rate",
            "short",
            *burn,
            width=12,
            help=f"1 spends a period's budget in that period. Alerts: {FAST} over 1h and 5m, {SLOW} over 6h and 30m.",
        ),
        series("Share of requests that miss it", "percentunit", *ratio, width=12),
    )


def availability():
    answers = f"sum(increase(http_requests_total{{{JOB}, {HANDLERS}}}[$__range]))"
    failed = f'sum(increase(http_requests_total{{{JOB}, status=~"5..", {HANDLERS}}}[$__range]))'
    recorded = "namespace_job:octavo_request_errors:ratio_rate"
    return objective("Availability: no 5xx", "availability", f"{failed} / ({answers} > 0)", recorded, "{{job}}")


def first_token():
    metric = "vllm:time_to_first_token_seconds"
    fast = f'sum(increase({metric}_bucket{{{JOB}, le="1.0"}}[$__range]))'
    slow = f"1 - {fast} / (sum(increase({metric}_count{{{JOB}}}[$__range])) > 0)"
    recorded = "namespace_job_model:octavo_ttft_over_1s:ratio_rate"
    return objective("First token within a second", "ttft", slow, recorded, "{{model_name}}")


def context():
    firing = 'count(ALERTS{alertname=~"Octavo.*|Gpu.*", alertstate="firing"}) or vector(0)'
    requests = f"sum by (job, status) (namespace_job_status:octavo_requests:rate5m{{{JOB}}})"
    return row(
        "Context",
        series("Requests", "reqps", query(requests, "{{job}} {{status}}"), width=12),
        series("Alerts that fire", "short", query(firing, "all"), width=12),
    )


def board():
    """The dashboard."""
    return dashboard(
        "octavo-slo",
        "Octavo: service-level objectives",
        "Availability and time to first token against their objectives. Needs the rules of recording.yaml.",
        VARIABLES,
        availability(),
        first_token(),
        context(),
    )
