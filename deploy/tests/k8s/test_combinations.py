"""Values of the chart in combinations that nobody has written down: refused with a sentence, or as sound as the others."""

import functools
import random
import re
import subprocess

import kubernetes_validate
import pytest

import crds
import lint_operation  # noqa: F401  (its rules join those of lint)
import render
from lint import World, lint

# Settings that stand together, to choose one from each.
CHOICES = [
    ["", "gateway.enabled=true", "gateway.enabled=true,gateway.host=a.example,gateway.tlsSecret=octavo-tls"],
    ["", "gateway.inferencePool=true", "gateway.inferencePool=true,kvEvents.enabled=true"],
    ["", "ingress.enabled=true", "ingress.enabled=true,ingress.host=a.example,ingress.tlsSecret=octavo-tls"],
    ["", "apiKey.secret=octavo-api-key"],
    ["", "apiKeysFile.secret=octavo-keys"],
    ["", "scheduling.policy=fair,scheduling.sharePrefixCache=true", "scheduling.policy=priority,scheduling.minPriority=0"],
    ["", "", "podTls.secret=octavo-pod-tls"],
    ["", "metrics.monitor=service", "metrics.monitor=pod"],
    ["", "otel.endpoint=http://otel-collector.observability:4317"],
    ["", "autoscaling.type=hpa,metrics.monitor=pod", "autoscaling.type=keda,metrics.monitor=service",
     "autoscaling.type=keda,autoscaling.minReplicas=0,metrics.monitor=service"],
    ["", "modelCache.type=pvc", "modelCache.type=clone", "modelCache.type=hostPath"],
    ["", "modelCache.preload=init", "modelCache.preload=job"],
    ["", "modelCache.accessMode=ReadWriteOnce"],
    ["", "modelCache.size=300Gi", "modelCache.size=1Ti"],
    ["", "strategy.type=surge", "strategy.type=recreate,replicas=1"],
    ["", "gpu.enabled=false", "gpu.sm70=true,gpu.runtimeClassName=nvidia"],
    ["", "spread.nodes=require", "spread.zones=true"],
    ["", "hub.offline=true"],
    ["", "podDisruptionBudget.enabled=false"],
    ["", "service.port=80,service.annotations.a=b"],
    ["", "networkPolicy.from[0].podSelector.matchLabels.role=chat", "networkPolicy.from[0].namespaceSelector.matchLabels.a=b"],
    ["", "gpu.resourceName=nvidia.com/mig-3g.40gb"],
    ["", "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].key=a,"
     "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator=Exists"],
    ["", "priorityClassName=serving,nodeSelector.disk=ssd,tolerations[0].key=a,tolerations[0].operator=Exists"],
    ["", "hub.endpoint=https://mirror.example"],
    ["", "requestTimeoutSeconds=60,shutdown.timeoutSeconds=90,shutdown.preStopSeconds=20"],
    ["", "fullnameOverride=a-name-that-is-as-long-as-a-name-of-an-object-may-well-be-here"],
]
SAMPLES = 48


@functools.cache
def drawn(seed: int) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Settings, and what the chart makes of them."""
    draw = random.Random(seed)
    settings = [one for one in (draw.choice(options) for options in CHOICES) if one]
    return settings, render.template(*(word for one in settings for word in ("--set", one)))


@pytest.mark.parametrize("seed", range(SAMPLES))
def test_a_combination_is_sound_or_refused(seed: int, world: World) -> None:
    settings, done = drawn(seed)
    if done.returncode != 0:
        # A sentence of the chart's own, and no fault of a template.
        assert re.search(r"execution error at \(octavo/templates/\S+\): [a-zA-Z]", done.stderr), done.stderr
        return
    m = render.manifests(done.stdout)
    # The cache that goes with the pod is the default.
    waived = [] if any("modelCache.type" in one for one in settings) else ["model-cache-outlives-the-pod"]
    assert lint(m, world, waived) == [], settings
    for it in m.objects:
        if it["kind"] in crds.KINDS:
            crds.validate(it)
        else:
            kubernetes_validate.validate(it, "1.34", strict=True)


def test_enough_of_them_are_rendered() -> None:
    assert sum(drawn(seed)[1].returncode == 0 for seed in range(SAMPLES)) >= SAMPLES // 4
