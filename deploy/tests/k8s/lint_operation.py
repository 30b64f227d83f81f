"""Rules about resources, life and death, balance, safety, and who speaks what; see lint.py."""

import json
import re
from collections.abc import Iterator

from lint import Complaint, World, keys_of, rule
from manifests import Manifests, Object, Workload, at, environment, flags, quantity, selects

# Seconds to load the largest model of the examples: 18 GB, fetched at 20 MB/s, and read.
LOAD_SECONDS = 1200
# Seconds from the moment when /live fails, as the engine is stuck or dead, to a new container.
REPLACEMENT = 30
# Seconds that the kubelet grants a preStop hook that uses up the grace.
HOOK_EXTENSION = 2
# Seconds in which a replica that has failed must be out of rotation.
OUT_OF_ROTATION = 10
# Seconds between the end of a drain and the kill.
MARGIN = 15
# Metrics of others that scaling may ask for.
FOREIGN_METRICS = {"nginx_ingress_controller_requests", "kube_deployment_spec_replicas"}
# The server's own default.
DEFAULT_SHUTDOWN_TIMEOUT = 25
# Seconds for which idle connections are kept: by the server, by ingress-nginx (upstream-keepalive-timeout) and by Envoy.
DEFAULT_KEEP_ALIVE, NGINX_KEEP_ALIVE, ENVOY_KEEP_ALIVE = 75, 60, 3600


# ---- resources


@rule
def quantities(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for container in it.containers:
            for kind in ("requests", "limits"):
                for name, value in at(container, "resources", kind, default={}).items():
                    if quantity(value) is None:
                        yield it.object, f"{kind}.{name} cannot be {value!r}"
        for volume in it.volumes.values():
            size = at(volume, "emptyDir", "sizeLimit", default="0")
            if quantity(size) is None:
                yield it.object, f"sizeLimit cannot be {size!r}"
    for it in m.of("PersistentVolumeClaim"):
        if quantity(at(it, "spec", "resources", "requests", "storage", default="")) is None:
            yield it, "storage is no quantity"


@rule
def resources_are_bounded(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for container in it.containers:
            requests, limits = (at(container, "resources", kind, default={}) for kind in ("requests", "limits"))
            for name in {"cpu", "memory", "ephemeral-storage"} - requests.keys():
                yield it.object, f"{name} is not requested"
            for name in {"memory", "ephemeral-storage"} - limits.keys():
                yield it.object, f"{name} has no limit"
            if "cpu" in limits:
                yield it.object, "a limit on CPU throttles threads in the middle of a step"
            for name in {name for name in [*requests, *limits] if "/" in name}:
                if requests.get(name) != limits.get(name):
                    yield it.object, f"the request of {name} is not its limit"


@rule
def disk_holds_the_volumes(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        empty = [volume["emptyDir"] for volume in it.volumes.values() if volume.get("emptyDir") is not None]
        if any("sizeLimit" not in one for one in empty):
            yield it.object, "an emptyDir has no sizeLimit"
        disk = sum(quantity(one.get("sizeLimit", 0)) or 0 for one in empty if one.get("medium") != "Memory")
        limits = [at(one, "resources", "limits", "ephemeral-storage", default=0) for one in it.serving]
        limit = sum(quantity(one) or 0 for one in limits)
        if disk >= limit:
            yield it.object, f"its volumes may fill {disk:.0f} bytes of disk, and {limit:.0f} are granted"


def gpu_resources(container: Object) -> set[str]:
    """Names of the extended resources that a container is limited to: nvidia.com/gpu, nvidia.com/mig-1g.10gb."""
    return {name for name in at(container, "resources", "limits", default={}) if "/" in name}


@rule
def gpus_are_used(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.pod["containers"]:
            variable = at(environment(container).get("OCTAVO_DEVICE"), "value", default="auto")
            device = flags(container).get("--device", variable)
            if gpu_resources(container) and device != "cuda":
                yield it.object, f"requests a GPU with the device {device}: without a usable GPU it would serve from the processor"
            elif not gpu_resources(container) and device != "cpu":
                yield it.object, f"requests no GPU, and the device is {device}"


# ---- life and death


def shutdown_timeout(it: Workload) -> float:
    return max(float(flags(one).get("--shutdown-timeout", DEFAULT_SHUTDOWN_TIMEOUT)) for one in it.serving)


@rule
def grace_covers_the_drain(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        before = max(at(one, "lifecycle", "preStop", "sleep", "seconds", default=0) for one in it.serving)
        if before < 5:
            yield it.object, "no preStop sleep: load balancers would still send requests"
        grace = it.pod.get("terminationGracePeriodSeconds", 30)
        if grace < before + shutdown_timeout(it) + MARGIN:
            yield it.object, f"{grace} s do not hold a preStop of {before} s and a drain of {shutdown_timeout(it)} s"


@rule
def drain_covers_the_proxies(m: Manifests, _: World) -> Iterator[Complaint]:
    drain = min((shutdown_timeout(it) for it in m.servers), default=0)
    for it in m.of("Ingress"):
        for key in ("read", "send"):
            value = at(it, "metadata", "annotations", f"nginx.ingress.kubernetes.io/proxy-{key}-timeout", default="60")
            if float(value) > drain:
                yield it, f"proxy-{key}-timeout is longer than the drain"
    for it in m.of("HTTPRoute"):
        for one in it["spec"]["rules"]:
            timeout = at(one, "timeouts", "request", default="")
            if one.get("backendRefs") and not (timeout.endswith("s") and 0 < float(timeout[:-1]) <= drain):
                yield it, f"the request timeout {timeout or 'that is not set'} is not within the drain of {drain:.0f} s"


@rule
def probes_are_quick_and_patient(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.serving:
            probes = {kind: container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")}
            spans = {
                kind: one.get("periodSeconds", 10) * one.get("failureThreshold", 3) for kind, one in probes.items()
            }
            if spans["startup"] < LOAD_SECONDS:
                yield it.object, f"{spans['startup']} s are too few to load a model"
            if any(one.get("initialDelaySeconds") for one in probes.values()):
                yield it.object, "initialDelaySeconds delays a server that is ready: the startup probe waits already"
            if spans["readiness"] > OUT_OF_ROTATION:
                yield it.object, f"a failed replica stays in rotation for {spans['readiness']} s"
            own = probes["liveness"].get("terminationGracePeriodSeconds", it.pod.get("terminationGracePeriodSeconds", 30))
            if spans["liveness"] + own + HOOK_EXTENSION > REPLACEMENT:
                yield it.object, f"a server that hangs is replaced after {spans['liveness'] + own + HOOK_EXTENSION} s"
            if at(probes["liveness"], "httpGet", "path") != "/live":
                yield it.object, "liveness must ask /live: /health fails while requests drain"
            if at(probes["readiness"], "httpGet", "path") != "/health":
                yield it.object, "readiness must ask /health"
            if it.spec.get("progressDeadlineSeconds", 600) < spans["startup"]:
                yield it.object, "a rollout fails before a start may take its time"


@rule
def rollout_cannot_deadlock(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        strategy = it.spec.get("strategy", {})
        rolling = strategy.get("rollingUpdate", {"maxSurge": "25%", "maxUnavailable": "25%"})
        waits = strategy.get("type") != "Recreate" and rolling.get("maxUnavailable") in (0, "0", "0%")
        affinity = at(it.pod, "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
        spread = [one["whenUnsatisfiable"] for one in it.pod.get("topologySpreadConstraints", [])]
        if waits and (affinity or "DoNotSchedule" in spread):
            yield it.object, "a surge pod finds no node before an old one goes, and none goes before it is ready"
        claims = [at(volume, "persistentVolumeClaim", "claimName") for volume in it.volumes.values()]
        alone = [m.find("PersistentVolumeClaim", name) for name in claims if name]
        if any(at(one, "spec", "accessModes") == ["ReadWriteOnce"] for one in alone):
            if strategy.get("type") != "Recreate" or it.spec.get("replicas") != 1:
                yield it.object, "a claim that one node mounts needs one replica and the strategy Recreate"


@rule
def spread_counts_nodes_that_take_pods(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for one in it.pod.get("topologySpreadConstraints", []):
            if one["whenUnsatisfiable"] == "DoNotSchedule" and one.get("nodeTaintsPolicy") != "Honor":
                yield it.object, "a cordoned node counts as an empty one: no pod could be placed beside it"
            if not selects(one.get("labelSelector"), it.labels):
                yield it.object, "a spread counts other pods"


@rule
def budget_lets_nodes_drain(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("PodDisruptionBudget"):
        if it["spec"].get("maxUnavailable") in (None, 0, "0", "0%"):
            yield it, "a node of a single replica could never be drained: use maxUnavailable"
        if it["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield it, "a pod that never became ready would keep its node from being drained"


@rule
def model_cache_outlives_the_pod(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.containers:
            home = at(environment(container), "HF_HOME", "value", default="")
            volume = next((one["name"] for one in container.get("volumeMounts", []) if one["mountPath"] == home), None)
            if volume is None:
                yield it.object, "HF_HOME is on no volume"
            elif it.volumes.get(volume, {}).get("emptyDir") is not None:
                yield it.object, "every pod downloads the model anew"


# ---- balance and scale


@rule
def requests_are_spread(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("Service"):
        if it["spec"].get("sessionAffinity", "None") != "None":
            yield it, "sessionAffinity sends all of a client to one replica"
    for it in m.of("Ingress"):
        if any("affinity" in key or "session-cookie" in key for key in at(it, "metadata", "annotations", default={})):
            yield it, "a cookie pins a client to one replica: the OpenAI SDK keeps cookies"


@rule
def streams_are_not_held_back(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("Ingress"):
        if at(it, "metadata", "annotations", "nginx.ingress.kubernetes.io/proxy-buffering") != "off":
            yield it, "proxy-buffering is not off"


@rule
def idle_connections_outlive_the_proxy(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.serving:
            variable = environment(container).get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", {})
            kept = float(variable.get("value", DEFAULT_KEEP_ALIVE))
            for kind, proxy in (("Ingress", NGINX_KEEP_ALIVE), ("HTTPRoute", ENVOY_KEEP_ALIVE)):
                if m.of(kind) and kept <= proxy:
                    yield it.object, f"closes an idle connection after {kept:.0f} s, which the proxy keeps for {proxy} s"


@rule
def scaling_has_a_target(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = it["spec"]["scaleTargetRef"]
        workload = m.find(target.get("kind", "Deployment"), target["name"])
        if workload is None:
            yield it, f"there is no {target['name']}"
        elif "replicas" in workload["spec"]:
            yield workload, "every apply would undo what the autoscaler did: leave replicas out"
    if len(m.of("HorizontalPodAutoscaler", "ScaledObject")) > 1:
        yield m.objects[0], "two autoscalers pull at one workload"


@rule
def scaling_asks_for_metrics_that_are(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.of("HorizontalPodAutoscaler"):
        for metric in it["spec"]["metrics"]:
            name = at(metric, "pods", "metric", "name")
            if world.adapter.get(name) not in world.metrics:
                yield it, f"nobody serves the metric {name}"
    jobs = {at(it, "metadata", "labels", "app") for it in m.of("Service")}
    for it in m.of("ScaledObject"):
        for query in (trigger["metadata"]["query"] for trigger in it["spec"]["triggers"]):
            for name in re.findall(r"([a-zA-Z_:][\w:]*)\{", query):
                if name not in world.metrics | FOREIGN_METRICS:
                    yield it, f"nobody exports the metric {name}"
            if not set(re.findall(r'job="([^"]*)"', query)) <= jobs:
                yield it, f"no Service has the job's label: {query}"


@rule
def scaling_has_its_own_metrics(m: Manifests, _: World) -> Iterator[Complaint]:
    scalers = m.of("HorizontalPodAutoscaler", "ScaledObject")
    if scalers and not m.of("ServiceMonitor", "PodMonitor"):
        yield scalers[0], "nothing scrapes the metrics that it scales by"
    for it in m.of("ScaledObject"):
        for trigger in it["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            for selector in re.findall(r"\{([^}]*)\}", query):
                if not re.search(rf'(^|,)(exported_)?namespace="{it["metadata"]["namespace"]}"', selector):
                    yield it, f"a namesake in another namespace counts too: {query}"
            if trigger["metadata"].get("ignoreNullValues") != "false":
                yield it, "missing metrics count as no load: ignoreNullValues must be false"


@rule
def scaling_outlives_its_metrics(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("ScaledObject"):
        fallback = it["spec"].get("fallback")
        if fallback and fallback.get("behavior") != "currentReplicasIfHigher":
            yield it, "without Prometheus replicas would be taken away under load"
        for query in (trigger["metadata"]["query"] for trigger in it["spec"]["triggers"]):
            for series in re.findall(r"increase\((.*?)\[", query):
                if f"{series} unless {series} offset" not in query:
                    yield it, f"a first request begins a series, which has not increased: {query}"


@rule
def gpus_of_one_capability(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        nodes = it.pod.get("nodeSelector", {})
        if "nvidia.com/gpu.compute.major" in nodes and "nvidia.com/gpu.compute.minor" not in nodes:
            yield it.object, "7 is the T4 (7.5) too, 8 the A100 (8.0) and the L40S (8.9)"


# ---- safety


@rule
def images_are_pinned(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for image in (container["image"] for container in it.containers):
            tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
            if "@sha256:" not in image and tag in ("", "latest"):
                yield it.object, f"nobody can say what {image} is"


@rule
def pods_are_restricted(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        pod = it.pod.get("securityContext", {})
        if pod.get("runAsNonRoot") is not True or pod.get("runAsUser") != 42420 or pod.get("fsGroup") != 42420:
            yield it.object, "does not run as the image's user, 42420"
        if at(pod, "seccompProfile", "type") != "RuntimeDefault":
            yield it.object, "has no seccomp profile"
        if it.pod.get("automountServiceAccountToken", True):
            yield it.object, "gets a token of the API that it does not need"
        for context in (container.get("securityContext", {}) for container in it.containers):
            if context.get("allowPrivilegeEscalation", True) or not context.get("readOnlyRootFilesystem"):
                yield it.object, "may gain privileges, or write into its image"
            if at(context, "capabilities", "drop") != ["ALL"] or at(context, "capabilities", "add"):
                yield it.object, "has capabilities"
        if enforced(m) & {"restricted", "baseline"} and any("hostPath" in volume for volume in it.volumes.values()):
            yield it.object, "its namespace allows no hostPath"


def enforced(m: Manifests) -> set[str]:
    """What Pod Security admits in the namespace."""
    key = "pod-security.kubernetes.io/enforce"
    return {at(one, "metadata", "labels", key) for one in m.of("Namespace")} - {None}


@rule
def pools_have_their_picker(m: Manifests, _: World) -> Iterator[Complaint]:
    for route in m.of("HTTPRoute"):
        backends = [ref for one in route["spec"]["rules"] for ref in one.get("backendRefs", [])]
        for pool in [ref["name"] for ref in backends if ref.get("kind") == "InferencePool"]:
            # The pool has the name of its chart's release, which in a namespace is nobody else's.
            if m.find("Service", pool):
                yield route, f"the release {pool} is the chart's own already: the pool needs another name"
            picker = {"llm-d-router-gateway": f"{pool[:40]}-epp"}
            sources = [one for it in m.of("NetworkPolicy") for way in it["spec"].get("ingress", []) for one in way["from"]]
            if not any(selects(one["podSelector"], picker) for one in sources if "podSelector" in one):
                yield route, f"no policy lets the picker of {pool} in"
            if "restricted" in enforced(m):
                yield route, "the picker's chart sets no securityContext: `restricted` admits none of its pods"


@rule
def read_only_root_has_room(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for container in it.containers:
            mounted = {mount["mountPath"] for mount in container.get("volumeMounts", []) if not mount.get("readOnly")}
            needed = {"/tmp", at(environment(container), "HF_HOME", "value", default="/workspace")}
            for path in needed - mounted:
                yield it.object, f"{path} cannot be written"


@rule
def secrets_stay_secret(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("Secret"):
        yield it, "a secret in a manifest is none"
    for it in m.workloads:
        for container in it.containers:
            for name, variable in environment(container).items():
                if re.search("TOKEN|KEY(?!S?_?FILE)|PASSWORD|SECRET", name) and variable.get("value"):
                    yield it.object, f"{name} is a secret in plain text"


@rule
def network_is_closed(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        policies = [one["spec"] for one in m.of("NetworkPolicy") if selects(one["spec"]["podSelector"], it.labels)]
        for direction in ("Ingress", "Egress"):
            if not any(direction in one["policyTypes"] for one in policies):
                yield it.object, f"{direction} is open"
        if any({} in one.get(direction, []) for one in policies for direction in ("ingress", "egress")):
            yield it.object, "a policy lets everything through"
    everywhere = [at(to, "ipBlock", "cidr") for one in m.of("NetworkPolicy") for to in destinations(one)]
    if everywhere.count("0.0.0.0/0") != everywhere.count("::/0"):
        yield m.objects[0], "the hub is reached over one family of addresses only"
    sources = {it["metadata"]["name"].rpartition("-from-")[2] for it in m.of("NetworkPolicy")}
    monitors = dict.fromkeys(("ServiceMonitor", "PodMonitor"), "prometheus")
    for kind, who in {"Ingress": "ingress-nginx", "HTTPRoute": "gateway", **monitors}.items():
        if m.of(kind) and who not in sources:
            yield m.of(kind)[0], f"no policy lets {who} in"


def destinations(policy: Object) -> Iterator[Object]:
    yield from (to for way in policy["spec"].get("egress", []) for to in way.get("to", []))


# ---- who speaks what


def encrypted(it: Workload) -> bool:
    """Whether a server takes TLS alone."""
    given = {name for one in it.serving for name in [*flags(one), *environment(one)]}
    return bool(given & {"--ssl-certfile", "OCTAVO_SSL_CERTFILE"})


@rule
def all_speak_tls_or_none(m: Manifests, _: World) -> Iterator[Complaint]:
    tls = any(encrypted(it) for it in m.servers)
    what = "the server takes TLS alone" if tls else "the server takes no TLS"
    for it in m.servers:
        for container in it.serving:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if (at(container, kind, "httpGet", "scheme", default="HTTP") == "HTTPS") != tls:
                    yield it.object, f"{kind}: {what}"
    for it in m.of("ServiceMonitor", "PodMonitor"):
        for endpoint in it["spec"].get("endpoints", it["spec"].get("podMetricsEndpoints")):
            if (endpoint.get("scheme", "http") == "https") != tls:
                yield it, what
    for it in m.of("Ingress"):
        protocol = at(it, "metadata", "annotations", "nginx.ingress.kubernetes.io/backend-protocol", default="HTTP")
        if (protocol == "HTTPS") != tls:
            yield it, what
    covered = {ref["name"] for it in m.of("BackendTLSPolicy") for ref in it["spec"]["targetRefs"]}
    for it in m.of("HTTPRoute"):
        for backend in [ref for one in it["spec"]["rules"] for ref in one.get("backendRefs", [])]:
            if tls and backend.get("kind", "Service") != "Service":
                yield it, f"{what}, and a BackendTLSPolicy is for Services"
            elif tls != (backend["name"] in covered):
                yield it, what


@rule
def certificates_are_checked(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.of("ServiceMonitor", "PodMonitor"):
        for endpoint in it["spec"].get("endpoints", it["spec"].get("podMetricsEndpoints")):
            tls = endpoint.get("tlsConfig", {})
            if endpoint.get("scheme") == "https" and (tls.get("insecureSkipVerify") or not tls.get("serverName")):
                yield it, "whoever answers would be believed"
            ca = at(tls, "ca", "secret")
            if ca and ca["key"] not in (keys_of(m, world, "Secret", ca["name"]) or ()):
                yield it, f"nobody makes {ca}"
    for it in m.of("Ingress"):
        prefix = "nginx.ingress.kubernetes.io/"
        notes = {key.removeprefix(prefix): value for key, value in at(it, "metadata", "annotations", default={}).items()}
        if notes.get("backend-protocol") == "HTTPS":
            space, _, name = notes.get("proxy-ssl-secret", "").partition("/")
            if notes.get("proxy-ssl-verify") != "on" or not notes.get("proxy-ssl-name"):
                yield it, "whoever answers would be believed"
            if space != it["metadata"]["namespace"] or "ca.crt" not in (keys_of(m, world, "Secret", name) or ()):
                yield it, f"proxy-ssl-secret: nobody makes {space}/{name} with a ca.crt"
    for it in m.of("BackendTLSPolicy"):
        for ref in it["spec"]["targetRefs"]:
            if m.find(ref["kind"], ref["name"]) is None:
                yield it, f"there is no {ref['kind']} {ref['name']}"
        for ref in it["spec"]["validation"].get("caCertificateRefs", []):
            if "ca.crt" not in (keys_of(m, world, ref["kind"], ref["name"]) or ()):
                yield it, f"nobody makes the {ref['kind']} {ref['name']} with a ca.crt"


@rule
def kv_events_are_reachable(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        policies = [one["spec"] for one in m.of("NetworkPolicy") if selects(one["spec"]["podSelector"], it.labels)]
        open_ports = {port["port"] for one in policies for way in one.get("ingress", []) for port in way.get("ports", [])}
        reachable = {it.port(port) for port in open_ports}
        for container in it.serving:
            text = at(environment(container), "OCTAVO_KV_EVENTS_CONFIG", "value", default="{}")
            config = json.loads(text)
            if config and not config.get("enable_kv_cache_events"):
                yield it.object, "KV events are configured, and not enabled"
            for key in ("endpoint", "replay_endpoint"):
                port = config.get(key, "").rpartition(":")[2]
                if port and it.port(int(port)) is None:
                    yield it.object, f"{key}: {port} is no port of the container"
                elif port and int(port) not in reachable:
                    yield it.object, f"{key}: no policy lets anybody in at {port}"
