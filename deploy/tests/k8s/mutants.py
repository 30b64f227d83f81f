"""Changes to good renderings, each with the rule that must complain: what makes the lint more than a list of wishes.

Among them is everything that validation against the schemas lets pass (see test_render.py for what it does catch).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from manifests import Manifests

Change = Callable[[Manifests], None]
DEPLOYMENT = ("Deployment", "octavo")
POD = ("spec", "template", "spec")
SERVER = (*POD, "containers", 0)


@dataclasses.dataclass(frozen=True)
class Mutant:
    rule: str
    rendering: str
    change: Change
    why: str


MUTANTS: list[Mutant] = []


def breaks(rule: str, rendering: str, why: str, change: Change) -> None:
    MUTANTS.append(Mutant(rule, rendering, change, why))


def named(m: Manifests, kind: str, name: str) -> Any:
    found = m.find(kind, name)
    assert found is not None, f"the mutant's object is gone: {kind}/{name}"
    return found


def put(target: tuple[str, str], *path_and_value: Any) -> Change:
    """Sets what lies at a path of an object; a path that ends in "+" appends."""
    *path, value = path_and_value

    def change(m: Manifests) -> None:
        place = named(m, *target)
        for key in path[:-1]:
            place = place[key]
        if path[-1] == "+":
            place.append(value)
        else:
            place[path[-1]] = value

    return change


def drop(target: tuple[str, str], *path: Any) -> Change:
    """Removes what lies at a path of an object, which must be there; without a path the object."""

    def change(m: Manifests) -> None:
        if not path:
            m.objects.remove(named(m, *target))
            return
        place = named(m, *target)
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def both(*changes: Change) -> Change:
    def change(m: Manifests) -> None:
        for one in changes:
            one(m)

    return change


def twice(kind: str, name: str) -> Change:
    return lambda m: m.objects.append(dict(named(m, kind, name)))


def flag(name: str, value: str) -> Change:
    """Gives a flag of the server another value."""

    def change(m: Manifests) -> None:
        words = named(m, *DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["args"]
        at = next(i for i, word in enumerate(words) if word.startswith(f"{name}="))
        words[at] = f"{name}={value}"

    return change


def variable(name: str, value: str) -> Change:
    """Gives a variable of the server another value."""

    def change(m: Manifests) -> None:
        variables = named(m, *DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["env"]
        next(one for one in variables if one["name"] == name)["value"] = value

    return change


def enforcing(level: str) -> Change:
    """Adds the namespace, which the chart does not render, with a level of Pod Security."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "octavo", "labels": labels}}
    return lambda m: m.objects.append(namespace)


def objects() -> None:
    breaks("unique", "production", "two Services of one name", twice("Service", "octavo"))
    breaks(
        "names",
        "production",
        "a name with an underscore",
        put(("Service", "octavo"), "metadata", "name", "octavo_1"),
    )
    breaks("names", "production", "a label with a blank", put(DEPLOYMENT, "metadata", "labels", "team", "a b"))
    breaks(
        "one-namespace",
        "production",
        "a Service elsewhere",
        put(("Service", "octavo"), "metadata", "namespace", "x"),
    )
    breaks("one-namespace", "production", "an object without one", drop(("Gateway", "octavo"), "metadata", "namespace"))
    breaks("enums", "production", "imagePullPolicy Sometimes", put(DEPLOYMENT, *SERVER, "imagePullPolicy", "Sometimes"))
    spread = (*POD, "topologySpreadConstraints", 0, "whenUnsatisfiable")
    breaks("enums", "production", "whenUnsatisfiable Maybe", put(DEPLOYMENT, *spread, "Maybe"))
    claim = ("PersistentVolumeClaim", "octavo-models")
    breaks("enums", "production", "an unknown access mode", put(claim, "spec", "accessModes", ["ReadWriteAll"]))


def references() -> None:
    breaks(
        "workload-selects-its-pods",
        "production",
        "another label",
        put(DEPLOYMENT, "spec", "selector", "matchLabels", "app", "x"),
    )
    service = ("Service", "octavo")
    breaks("service-selects-servers-alone", "production", "no pods", put(service, "spec", "selector", "app", "other"))
    pull = ("Job", "octavo-pull")
    labels = ("spec", "template", "metadata", "labels", "app")
    breaks("service-selects-servers-alone", "ovh-mks", "a Job's pods too", put(pull, *labels, "qwen3-vl"))
    hashed = {"configMap": {"name": "octavo-config-7d9f4c2b6t"}, "name": "config"}
    breaks("jobs-outlive-a-change", "ovh-mks", "a hash", put(pull, *POD, "volumes", "+", hashed))
    breaks(
        "service-ports-exist",
        "production",
        "a port of no container",
        put(service, "spec", "ports", 0, "targetPort", "web"),
    )
    selector = ("spec", "selector", "matchLabels", "app", "other")
    breaks(
        "policies-select-pods",
        "production",
        "a budget of nothing",
        put(("PodDisruptionBudget", "octavo"), *selector),
    )
    breaks("policies-select-pods", "routing", "a monitor of nothing", put(("PodMonitor", "octavo"), *selector))
    policy = ("NetworkPolicy", "octavo")
    pods = ("spec", "podSelector", "matchLabels", "app", "other")
    breaks("policies-select-pods", "production", "a policy of nothing", put(policy, *pods))
    monitor = ("ServiceMonitor", "octavo")
    breaks("monitors-find-their-port", "production", "no such Service", put(monitor, *selector))
    # The example's own mistake: the Service says gpu-metrics, the patch says metrics.
    port = ("spec", "endpoints", 0, "port")
    breaks("monitors-find-their-port", "production", "a port that is not named so", put(monitor, *port, "metrics"))
    breaks("monitors-find-their-port", "production", "by number", put(service, "spec", "ports", 0, "name", "web"))
    path = ("spec", "rules", 0, "http", "paths", 0, "backend", "service")
    ingress = ("Ingress", "octavo")
    breaks("backends-exist", "single-gpu", "no such Service", put(ingress, *path, "name", "octavo-1"))
    breaks("backends-exist", "single-gpu", "no such port", put(ingress, *path, "port", "name", "web"))
    route = ("HTTPRoute", "octavo")
    backend = ("spec", "rules", 0, "backendRefs", 0)
    breaks("backends-exist", "production", "a route to another port", put(route, *backend, "port", 80))
    breaks("routes-have-a-gateway", "production", "a gateway of another name", drop(("Gateway", "octavo")))
    breaks(
        "routes-have-a-gateway",
        "production",
        "no such listener",
        put(route, "spec", "parentRefs", 0, "sectionName", "tls"),
    )
    env = (*SERVER, "env", 0, "valueFrom", "configMapKeyRef")
    breaks("references-exist", "production", "no such ConfigMap", put(DEPLOYMENT, *env, "name", "octavo-conf"))
    breaks("references-exist", "production", "no such key", put(DEPLOYMENT, *env, "key", "modell"))
    token = (*SERVER, "env", 2, "valueFrom", "secretKeyRef", "key")
    breaks("references-exist", "production", "no such key of a secret", put(DEPLOYMENT, *token, "tokens"))
    breaks("references-exist", "production", "no account", drop(("ServiceAccount", "octavo")))
    breaks("references-exist", "production", "no claim", drop(("PersistentVolumeClaim", "octavo-models")))
    breaks("references-exist", "ovh-mks", "no key of the article", drop(("ConfigMap", "vllm-config"), "data", "dtype"))
    variable = put(DEPLOYMENT, *SERVER, "args", "+", "--dtype=$(DTYPE)")
    breaks("variables-are-defined", "production", "a variable that nobody sets", variable)

    def last_first(m: Manifests) -> None:
        named(m, *DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["env"].reverse()

    breaks("variables-are-defined", "routing", "a variable that is set too late", last_first)
    breaks(
        "mounts-have-volumes",
        "production",
        "a mount of nothing",
        put(DEPLOYMENT, *SERVER, "volumeMounts", 0, "name", "x"),
    )
    extra = put(DEPLOYMENT, *POD, "volumes", "+", {"name": "spare", "emptyDir": {"sizeLimit": "1Mi"}})
    breaks("mounts-have-volumes", "production", "a volume for nobody", extra)


def server() -> None:
    probe = (*SERVER, "readinessProbe", "httpGet")
    breaks("probes-ask-what-is-served", "production", "no such route", put(DEPLOYMENT, *probe, "path", "/healthz"))
    breaks("probes-ask-what-is-served", "production", "no such port", put(DEPLOYMENT, *probe, "port", "web"))
    breaks("probes-ask-what-is-served", "production", "no probe", drop(DEPLOYMENT, *SERVER, "startupProbe"))
    monitor = ("ServiceMonitor", "octavo")
    scrape = put(monitor, "spec", "endpoints", 0, "path", "/prometheus")
    breaks("probes-ask-what-is-served", "production", "a scrape of nothing", scrape)
    breaks("port-is-the-servers", "production", "listens elsewhere", flag("--port", "8080"))
    dtype = {"name": "OCTAVO_MAX_MODEL_LEN", "value": "4096"}
    ignored = put(DEPLOYMENT, *SERVER, "env", "+", dtype)
    breaks("flags-are-set-once", "production", "a variable that the file overrules", ignored)
    for name in ("OCTAVO_MAX_NUM_SEQUENCES", "VLLM_PORT"):
        unread = put(DEPLOYMENT, *SERVER, "env", "+", {"name": name, "value": "8"})
        breaks("variables-are-known", "production", name, unread)
    route = ("HTTPRoute", "octavo")
    path = ("spec", "rules", 0, "matches", 0, "path", "value")
    breaks("paths-are-public-and-served", "production", "everything", put(route, *path, "/"))
    breaks("paths-are-public-and-served", "production", "without a match", drop(route, "spec", "rules", 0, "matches"))
    breaks("paths-are-public-and-served", "production", "no such route", put(route, *path, "/v2"))
    ingress = put(("Ingress", "octavo"), "spec", "rules", 0, "http", "paths", 2, "path", "/metrics")
    breaks("paths-are-public-and-served", "single-gpu", "the metrics", ingress)
    breaks(
        "no-code-of-models",
        "production",
        "the example's flag",
        put(DEPLOYMENT, *SERVER, "args", "+", "--trust-remote-code"),
    )
    breaks("no-service-links", "production", "OCTAVO_PORT", drop(DEPLOYMENT, *POD, "enableServiceLinks"))


def resources() -> None:
    limits, requests = (*SERVER, "resources", "limits"), (*SERVER, "resources", "requests")
    breaks("quantities", "production", "60Gigs", put(DEPLOYMENT, *limits, "memory", "60Gigs"))
    storage = put(("PersistentVolumeClaim", "octavo-models"), "spec", "resources", "requests", "storage", "50 Gi")
    breaks("quantities", "production", "a blank", storage)
    bounded = "resources-are-bounded"
    breaks(
        bounded,
        "production",
        "GPUs asked for are not those granted",
        put(DEPLOYMENT, *limits, "nvidia.com/gpu", "2"),
    )
    breaks(bounded, "production", "GPUs only asked for", drop(DEPLOYMENT, *limits, "nvidia.com/gpu"))
    breaks(bounded, "production", "memory without end", drop(DEPLOYMENT, *limits, "memory"))
    breaks(bounded, "production", "throttled", put(DEPLOYMENT, *limits, "cpu", "8"))
    breaks(bounded, "production", "processors not asked for", drop(DEPLOYMENT, *requests, "cpu"))
    breaks("disk-holds-the-volumes", "base", "a small disk", put(DEPLOYMENT, *limits, "ephemeral-storage", "50Gi"))
    endless = put(DEPLOYMENT, *POD, "volumes", "+", {"name": "more", "emptyDir": {}})
    breaks("disk-holds-the-volumes", "production", "no bound", endless)


def devices() -> None:
    breaks("gpus-are-used", "production", "the default device", variable("OCTAVO_DEVICE", "auto"))
    breaks("gpus-are-used", "production", "a flag that wins", put(DEPLOYMENT, *SERVER, "args", "+", "--device=cpu"))
    breaks("gpus-are-used", "dev-cpu", "no GPU to use", variable("OCTAVO_DEVICE", "cuda"))


def life() -> None:
    grace = (*POD, "terminationGracePeriodSeconds")
    breaks("grace-covers-the-drain", "production", "the default of 30 s", drop(DEPLOYMENT, *grace))
    breaks("grace-covers-the-drain", "production", "a longer drain", flag("--shutdown-timeout", "301"))
    breaks("grace-covers-the-drain", "production", "no preStop", drop(DEPLOYMENT, *SERVER, "lifecycle"))
    breaks("drain-covers-the-proxies", "production", "a drain of 60 s", flag("--shutdown-timeout", "60"))
    annotations = ("metadata", "annotations", "nginx.ingress.kubernetes.io/proxy-read-timeout")
    breaks("drain-covers-the-proxies", "single-gpu", "a patient proxy", put(("Ingress", "octavo"), *annotations, "600"))
    breaks(
        "drain-covers-the-proxies",
        "production",
        "no bound",
        drop(("HTTPRoute", "octavo"), "spec", "rules", 0, "timeouts"),
    )
    quick = "probes-are-quick-and-patient"
    breaks(quick, "production", "two minutes to load", put(DEPLOYMENT, *SERVER, "startupProbe", "failureThreshold", 24))
    # The example's readiness and liveness.
    breaks(
        quick,
        "production",
        "180 s of delay",
        put(DEPLOYMENT, *SERVER, "readinessProbe", "initialDelaySeconds", 180),
    )
    breaks(quick, "production", "dead in rotation", put(DEPLOYMENT, *SERVER, "readinessProbe", "failureThreshold", 30))
    drained = drop(DEPLOYMENT, *SERVER, "livenessProbe", "terminationGracePeriodSeconds")
    breaks(quick, "production", "the grace of a drain for a server that hangs", drained)
    breaks(quick, "production", "hangs for a minute", put(DEPLOYMENT, *SERVER, "livenessProbe", "failureThreshold", 12))
    liveness = (*SERVER, "livenessProbe", "httpGet", "path")
    breaks(quick, "production", "killed while it drains", put(DEPLOYMENT, *liveness, "/health"))
    breaks(
        quick,
        "production",
        "in rotation while it loads",
        put(DEPLOYMENT, *SERVER, "readinessProbe", "httpGet", "path", "/live"),
    )
    breaks(quick, "production", "a rollout's patience", put(DEPLOYMENT, "spec", "progressDeadlineSeconds", 600))
    # The example's rollout.
    surge = put(DEPLOYMENT, "spec", "strategy", "rollingUpdate", {"maxSurge": 1, "maxUnavailable": 0})
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "octavo"}}}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    deadlock = both(surge, put(DEPLOYMENT, *POD, "affinity", apart))
    breaks("rollout-cannot-deadlock", "production", "one GPU a node, surge first", deadlock)
    spread = put(DEPLOYMENT, *POD, "topologySpreadConstraints", 0, "whenUnsatisfiable", "DoNotSchedule")
    breaks("rollout-cannot-deadlock", "production", "one pod a node, surge first", both(surge, spread))
    breaks("rollout-cannot-deadlock", "single-gpu", "two pods, one node's disk", put(DEPLOYMENT, "spec", "replicas", 2))
    rolling = put(DEPLOYMENT, "spec", "strategy", {"type": "RollingUpdate"})
    breaks("rollout-cannot-deadlock", "single-gpu", "the new pod waits for the old one's disk", rolling)
    budget = ("PodDisruptionBudget", "octavo")
    fixed = both(drop(budget, "spec", "maxUnavailable"), put(budget, "spec", "minAvailable", 1))
    breaks("budget-lets-nodes-drain", "single-gpu", "the example's budget", fixed)
    breaks(
        "budget-lets-nodes-drain",
        "production",
        "sick pods stay",
        drop(budget, "spec", "unhealthyPodEvictionPolicy"),
    )
    breaks(
        "model-cache-outlives-the-pod",
        "production",
        "elsewhere",
        put(DEPLOYMENT, *SERVER, "env", 1, "value", "/root"),
    )
    volume = {"name": "models", "emptyDir": {"sizeLimit": "50Gi"}}
    gone = put(DEPLOYMENT, *POD, "volumes", 0, volume)
    breaks("model-cache-outlives-the-pod", "production", "the example's cache", gone)


def balance() -> None:
    affinity = put(("Service", "octavo"), "spec", "sessionAffinity", "ClientIP")
    breaks("requests-are-spread", "production", "the example's Service", affinity)
    cookie = ("metadata", "annotations", "nginx.ingress.kubernetes.io/affinity")
    breaks("requests-are-spread", "single-gpu", "the example's cookie", put(("Ingress", "octavo"), *cookie, "cookie"))
    buffering = ("metadata", "annotations", "nginx.ingress.kubernetes.io/proxy-buffering")
    breaks("streams-are-not-held-back", "single-gpu", "a buffer", put(("Ingress", "octavo"), *buffering, "on"))
    breaks(
        "idle-connections-outlive-the-proxy",
        "production",
        "a minute, and Envoy's an hour",
        variable("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75"),
    )
    seconds = {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "5"}
    breaks("idle-connections-outlive-the-proxy", "single-gpu", "vLLM's own", put(DEPLOYMENT, *SERVER, "env", "+", seconds))
    target = ("spec", "scaleTargetRef", "name")
    breaks("scaling-has-a-target", "routing", "nobody", put(("HorizontalPodAutoscaler", "octavo"), *target, "vllm"))
    breaks("scaling-has-a-target", "elastic", "nobody", put(("ScaledObject", "octavo"), *target, "vllm"))
    breaks("scaling-has-a-target", "routing", "replicas set back", put(DEPLOYMENT, "spec", "replicas", 2))
    hpa = ("spec", "metrics", 0, "pods", "metric", "name")
    outlives = "scaling-outlives-its-metrics"
    breaks(outlives, "offline", "fewer under load", drop(("ScaledObject", "octavo"), "spec", "fallback", "behavior"))
    requests = 'nginx_ingress_controller_requests{exported_namespace="octavo",ingress="octavo"}'
    keepalive = ("spec", "triggers", 2, "metadata", "query")
    grown = put(("ScaledObject", "octavo"), *keepalive, f"sum(increase({requests}[10m])) > bool 0")
    breaks(outlives, "elastic", "a series that has just begun", grown)
    own, scaled = "scaling-has-its-own-metrics", ("ScaledObject", "octavo")
    breaks(own, "elastic", "nothing scrapes", drop(("ServiceMonitor", "octavo")))
    breaks(own, "routing", "nothing scrapes the pods", drop(("PodMonitor", "octavo")))
    trigger = ("spec", "triggers", 0, "metadata")
    everywhere = put(scaled, *trigger, "query", 'sum(vllm:num_requests_waiting{job="octavo"})')
    breaks(own, "offline", "every namespace", everywhere)
    breaks(own, "offline", "no metrics, no load", drop(scaled, *trigger, "ignoreNullValues"))
    minor = (*POD, "nodeSelector", "nvidia.com/gpu.compute.minor")
    breaks("gpus-of-one-capability", "elastic", "T4 too", drop(DEPLOYMENT, *minor))
    asks = "scaling-asks-for-metrics-that-are"
    breaks(
        asks,
        "routing",
        "not the adapter's name",
        put(("HorizontalPodAutoscaler", "octavo"), *hpa, "vllm:num_requests_waiting"),
    )
    query = ("spec", "triggers", 0, "metadata", "query")
    scaled = ("ScaledObject", "octavo")
    breaks(asks, "elastic", "a typo", put(scaled, *query, 'sum(vllm:num_request_waiting{job="octavo"})'))
    breaks(asks, "elastic", "another job", put(scaled, *query, 'sum(vllm:num_requests_waiting{job="vllm"})'))


def safety() -> None:
    for image in ("octavo", "octavo:latest", "registry.example.com:5000/octavo"):
        breaks("images-are-pinned", "production", image, put(DEPLOYMENT, *SERVER, "image", image))
    restricted = "pods-are-restricted"
    breaks(restricted, "production", "root", put(DEPLOYMENT, *POD, "securityContext", "runAsUser", 0))
    breaks(restricted, "production", "no seccomp", drop(DEPLOYMENT, *POD, "securityContext", "seccompProfile"))
    breaks(restricted, "production", "a token", drop(DEPLOYMENT, *POD, "automountServiceAccountToken"))
    security = (*SERVER, "securityContext")
    breaks(restricted, "production", "sudo", drop(DEPLOYMENT, *security, "allowPrivilegeEscalation"))
    breaks(restricted, "production", "a writable image", put(DEPLOYMENT, *security, "readOnlyRootFilesystem", False))
    breaks(restricted, "production", "a capability", put(DEPLOYMENT, *security, "capabilities", "add", ["SYS_ADMIN"]))
    breaks(restricted, "elastic", "a host's folder", enforcing("restricted"))
    breaks(restricted, "elastic", "a host's folder, almost", enforcing("baseline"))
    picker = "pools-have-their-picker"
    breaks(picker, "routing", "no pod of it is admitted", enforcing("restricted"))
    breaks(picker, "routing", "it is shut out", drop(("NetworkPolicy", "octavo-from-epp")))
    backend = ("spec", "rules", 0, "backendRefs", 0, "name")
    breaks(picker, "routing", "two releases of one name", put(("HTTPRoute", "octavo"), *backend, "octavo"))
    breaks(
        "read-only-root-has-room",
        "production",
        "no /tmp",
        put(DEPLOYMENT, *SERVER, "volumeMounts", 3, "mountPath", "/t"),
    )
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "octavo"}}
    breaks("secrets-stay-secret", "production", "a Secret", lambda m: m.objects.append(secret))
    plain = {"name": "HF_TOKEN", "value": "hf_x"}
    breaks("secrets-stay-secret", "production", "a token", put(DEPLOYMENT, *SERVER, "env", 2, plain))
    closed = "network-is-closed"
    breaks(closed, "production", "no policy", drop(("NetworkPolicy", "octavo")))
    breaks(closed, "ovh-mks", "no policy for the Job", drop(("NetworkPolicy", "octavo-pull")))
    breaks(closed, "production", "all may leave", put(("NetworkPolicy", "octavo"), "spec", "egress", "+", {}))
    four = ("spec", "egress", 1, "to", 1)
    breaks(closed, "production", "IPv4 only", drop(("NetworkPolicy", "octavo"), *four))
    breaks(closed, "production", "Prometheus is shut out", drop(("NetworkPolicy", "octavo-from-prometheus")))
    breaks(closed, "production", "the gateway is shut out", drop(("NetworkPolicy", "octavo-from-gateway")))


def speech() -> None:
    env, probe = (*SERVER, "env"), (*SERVER, "livenessProbe", "httpGet", "scheme")
    tls = "all-speak-tls-or-none"
    monitor, ingress, policy = (("ServiceMonitor", "octavo"), ("Ingress", "octavo"), ("BackendTLSPolicy", "octavo"))
    notes = ("metadata", "annotations")
    breaks(tls, "encrypted", "a plain probe", put(DEPLOYMENT, *probe, "HTTP"))
    breaks(tls, "encrypted", "a plain scrape", drop(monitor, "spec", "endpoints", 0, "scheme"))
    plain = drop(ingress, *notes, "nginx.ingress.kubernetes.io/backend-protocol")
    breaks(tls, "encrypted", "an ingress that speaks HTTP", plain)
    breaks(tls, "encrypted", "a gateway that speaks HTTP", drop(policy))
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "octavo"}
    breaks(tls, "encrypted", "a pool", put(("HTTPRoute", "octavo"), "spec", "rules", 0, "backendRefs", 0, pool))
    breaks(tls, "production", "a probe that speaks TLS", put(DEPLOYMENT, *probe, "HTTPS"))
    checked = "certificates-are-checked"
    config = ("spec", "endpoints", 0, "tlsConfig")
    breaks(checked, "encrypted", "any certificate", put(monitor, *config, "insecureSkipVerify", True))
    breaks(checked, "encrypted", "no such key", put(monitor, *config, "ca", "secret", "key", "ca.pem"))
    verify = put(ingress, *notes, "nginx.ingress.kubernetes.io/proxy-ssl-verify", "off")
    breaks(checked, "encrypted", "any certificate will do for the ingress", verify)
    elsewhere = put(ingress, *notes, "nginx.ingress.kubernetes.io/proxy-ssl-secret", "default/octavo-pod-tls")
    breaks(checked, "encrypted", "a secret of another namespace", elsewhere)
    breaks(checked, "encrypted", "a policy for nobody", put(policy, "spec", "targetRefs", 0, "name", "x"))
    authority = ("spec", "validation", "caCertificateRefs", 0, "name")
    breaks(checked, "encrypted", "nobody's certificate", put(policy, *authority, "octavo-ca"))
    key = put(DEPLOYMENT, *env, 0, {"name": "OCTAVO_SSL_KEYFILE", "value": "/etc/octavo-tls/tls.pem"})
    breaks("references-exist", "encrypted", "a file that the secret has not", key)
    reachable = "kv-events-are-reachable"
    breaks(reachable, "multi-node", "nobody is let in", drop(("NetworkPolicy", "octavo-kv-events-from-epp")))
    for why, config in (
        ("another port", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5600"}'),
        ("not enabled", '{"endpoint": "tcp://*:5557"}'),
    ):
        breaks(reachable, "multi-node", why, variable("OCTAVO_KV_EVENTS_CONFIG", config))
    spread = (*POD, "topologySpreadConstraints", 0)
    counts = "spread-counts-nodes-that-take-pods"
    breaks(counts, "multi-node", "cordoned nodes", drop(DEPLOYMENT, *spread, "nodeTaintsPolicy"))
    other = put(DEPLOYMENT, *spread, "labelSelector", {"matchLabels": {"app": "x"}})
    breaks(counts, "multi-node", "other pods", other)


for group in (objects, references, server, resources, devices, life, balance, safety, speech):
    group()
