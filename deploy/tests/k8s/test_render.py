"""Renderings are valid, equal where they should be, and change only when somebody wants them to."""

import copy
import os
import re
import shutil

import jsonschema
import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

import crds
import render
from manifests import Manifests, at, environment
from tools import HELM

VERSIONS = ["1.30", "1.34", "1.37"]
HERE = render.pathlib.Path(__file__).parent
LOOKS = YamlLintConfig(file=str(HERE / "yamllint.yaml"))
# What tools write has no line lengths or indentation to argue about.
SOUND = YamlLintConfig("{extends: relaxed, rules: {line-length: disable, indentation: disable}}")


def sources() -> list[render.pathlib.Path]:
    folders = [render.DEPLOY / "k8s", HERE, render.CHART, render.VALUES]
    found = [path for folder in folders for path in folder.rglob("*.yaml") if "templates" not in path.parts]
    return sorted(set(found))


@pytest.mark.parametrize("path", sources(), ids=lambda it: str(it.relative_to(render.DEPLOY)))
def test_sources_are_clean(path: render.pathlib.Path) -> None:
    assert not list(linter.run(path.read_text(), LOOKS, str(path)))


def test_renderings_are_sound_yaml(kustomized: dict[str, str], charts: dict[str, str]) -> None:
    for text in [*kustomized.values(), *charts.values()]:
        problems = [it for it in linter.run(text, SOUND) if it.level == "error"]
        assert not problems, problems


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str, renderings: dict[str, Manifests]) -> None:
    seen = 0
    for it in [it for m in renderings.values() for it in m.objects if it["kind"] not in crds.KINDS]:
        kubernetes_validate.validate(it, version, strict=True)
        seen += 1
    assert seen > 100


def test_custom_resources_are_valid(renderings: dict[str, Manifests]) -> None:
    custom = [it for m in renderings.values() for it in m.of(*crds.KINDS)]
    assert {it["kind"] for it in custom} == crds.KINDS
    for it in custom:
        crds.validate(it)


CORE = [
    (("template", "spec", "containers", 0, "imagePullpolicy"), "Always"),
    (("replicas",), "two"),
    (("template", "spec", "containers"), None),
]


@pytest.mark.parametrize(("path", "value"), CORE)
@pytest.mark.parametrize("version", VERSIONS)
def test_validation_is_strict(version: str, path: tuple, value: object, renderings: dict[str, Manifests]) -> None:
    deployment = changed(render.example(renderings, "production"), "Deployment", path, value)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, version, strict=True)


CUSTOM = [
    ("production", "ServiceMonitor", ("endpoints", 0, "intervall"), "15s"),
    ("production", "ServiceMonitor", ("endpoints", 0, "scheme"), "htp"),
    ("routing", "PodMonitor", ("selector",), None),
    ("elastic", "ScaledObject", ("triggers", 0, "metadataa"), {}),
    ("elastic", "ScaledObject", ("minReplicaCount",), "none"),
    ("offline", "ScaledObject", ("fallback", "behavior"), "higher"),
    ("offline", "ScaledObject", ("fallback", "replica"), 2),
    ("production", "Gateway", ("listeners", 0, "protocol"), "HTTP2"),
    ("production", "HTTPRoute", ("rules", 0, "timeouts", "request"), "300"),
    ("production", "HTTPRoute", ("rules", 0, "backendRef"), []),
    ("encrypted", "BackendTLSPolicy", ("validation", "hostname"), "*.octavo"),
    ("encrypted", "BackendTLSPolicy", ("validation", "caCertificateRef"), {}),
    ("encrypted", "BackendTLSPolicy", ("targetRefs", 0, "kind"), "InferencePool"),
    ("encrypted", "ServiceMonitor", ("endpoints", 0, "tlsConfig", "serverNames"), ["octavo"]),
]


@pytest.mark.parametrize(("name", "kind", "path", "value"), CUSTOM)
def test_custom_validation_is_strict(
    name: str, kind: str, path: tuple, value: object, renderings: dict[str, Manifests]
) -> None:
    with pytest.raises(ValueError):
        crds.validate(changed(render.example(renderings, name), kind, path, value))


def changed(m: Manifests, kind: str, path: tuple, value: object) -> dict:
    """The first object of a kind with another value in its spec; None takes it away."""
    it = copy.deepcopy(m.of(kind)[0])
    place = at(it, "spec", *path[:-1])
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return it


@pytest.mark.parametrize("name", render.SHARED)
def test_helm_renders_what_kustomize_does(name: str, charts: dict[str, str], kustomized: dict[str, str]) -> None:
    helm, kustomize = render.comparable(charts[name]), render.comparable(kustomized[name])
    assert helm == kustomize


@pytest.mark.parametrize(
    "setting", ["replicas=3", "config.max-model-len=4096", "podAnnotations.a=b", "networkPolicy.enabled=false"]
)
def test_differences_are_noticed(setting: str, kustomized: dict[str, str]) -> None:
    done = render.template("--set", setting)
    assert done.returncode == 0 and render.comparable(done.stdout) != render.comparable(kustomized["base"])


@pytest.mark.parametrize("name", render.SNAPSHOTS)
def test_golden(name: str, charts: dict[str, str]) -> None:
    path = render.GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(charts[name])
    assert charts[name] == path.read_text(), "it has changed; if that is right, run again with UPDATE_SNAPSHOTS=1"


def test_golden_has_nothing_else() -> None:
    assert {path.stem for path in render.GOLDEN.iterdir()} == set(render.SNAPSHOTS)


@pytest.mark.parametrize("name", render.CHARTS)
def test_helm_lint(name: str) -> None:
    values = render.CHARTS[name]
    done = render.run(HELM, "lint", "--strict", render.CHART, *(["--values", values] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr


def test_defaults_are_complete() -> None:
    """Every value of the schema has a default, and every default a place in the schema: nothing is undocumented."""
    schema = yaml.safe_load((render.CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((render.CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def compare(schema: dict, value: dict, path: str) -> None:
        names = schema["properties"].keys() - {"global"}
        assert names == value.keys(), f"{path}: {names ^ value.keys()}"
        for name in names:
            if "properties" in schema["properties"][name]:
                compare(schema["properties"][name], value[name], f"{path}.{name}")

    compare(schema, defaults, "values")


# What is set, and what the refusal must say.
REFUSED = [
    ("replicas=two", "replicas"),
    ("replica=3", "replica"),
    ("image.tag=latest", "/image/tag"),
    ("image.digest=sha256:12", "/image/digest"),
    ("image.pullPolicy=Sometimes", "pullPolicy"),
    ("resources.limits.memory=60Gigs", "/resources/limits/memory"),
    ("resources.limits.memory=30Gi", "resources.requests.memory is larger than resources.limits.memory"),
    ("resources.requests.cpu=7500m,resources.limits.cpu=7", "resources.requests.cpu is larger than resources.limits.cpu"),
    ("resources.requests.memory=0", "/resources/requests/memory"),
    ("modelCache.size=0Gi", "/modelCache/size"),
    ("modelCache.preload=init,hub.offline=true", "hub.offline keeps from the hub"),
    ("nameOverride=a.b", "/nameOverride"),
    ("fullnameOverride=0a", "/fullnameOverride"),
    ("otel.endpoint=http://collector:70000", "a port is at most 65535"),
    ("extraEnv[0].name=OCTAVO_DEVICE,extraEnv[0].value=auto", "extraEnv repeats OCTAVO_DEVICE"),
    ("extraEnv[0].name=A,extraEnv[0].value=x,extraEnv[1].name=A,extraEnv[1].value=y", "extraEnv repeats A"),
    ("extraEnv[0].name=A,extraEnv[0].value=5", "/extraEnv/0/value"),
    ("gpu.resourceName=gpu", "/gpu/resourceName"),
    ("gpu.enabled=false,gpu.resourceName=nvidia.com/mig-1g.10gb", "gpu.resourceName needs gpu.enabled"),
    ("affinity.nodes=a", "nodes"),
    # An API server refuses these in the middle of an upgrade, warns of them or takes one of two values.
    ("hub.tokenKey=a b", "/hub/tokenKey"),
    ("apiKey.key=a/b", "/apiKey/key"),
    ("apiKey.secret=a..b", "/apiKey/secret"),
    ("metrics.namespace=a.b", "/metrics/namespace"),
    ("nodeSelector.a b=c", "invalid propertyName 'a b'"),
    ("service.annotations.a b=c", "invalid propertyName 'a b'"),
    ("podLabels.app\\.kubernetes\\.io/name=x", "invalid propertyName 'app.kubernetes.io/name'"),
    ("podAnnotations.checksum/config=xx", "invalid propertyName 'checksum/config'"),
    ("resources.requests.memory=500m", "/resources/requests/memory"),
    ("requestTimeoutSeconds=100000,shutdown.timeoutSeconds=100000", "/requestTimeoutSeconds"),
    ("replicas=1000000", "/replicas"),
    ("gpu.count=2", "/gpu/count"),
    ("modelCache.type=nfs", "/modelCache/type"),
    ("modelCache.accessMode=ReadWriteAll", "accessMode"),
    ("metrics.monitor=yes", "/metrics/monitor"),
    ("metrics.interval=fast", "/metrics/interval"),
    ("ingress.annotations.nginx\\.ingress\\.kubernetes\\.io/affinity=cookie", "nginx.ingress.kubernetes.io/affinity"),
    ("podLabels.app=x", "invalid propertyName 'app'"),
    ("otel.endpoint=http://collector", "/otel/endpoint"),
    ("service.port=70000", "/service/port"),
    ("shutdown.preStopSeconds=0", "preStopSeconds"),
    ("shutdown.timeoutSeconds=60", "a rollout would cut requests"),
    ("requestTimeoutSeconds=900", "a rollout would cut requests"),
    ("modelCache.preload=job", "modelCache.preload job fills a claim"),
    ("modelCache.type=pvc,modelCache.accessMode=ReadWriteOnce", "mounted by one node"),
    ("ingress.tlsSecret=x", "ingress.tlsSecret needs ingress.host"),
    ("gateway.tlsSecret=x", "gateway.tlsSecret needs gateway.host"),
    ("gateway.inferencePool=true", "gateway.inferencePool needs gateway.enabled"),
    ("podTls.secret=x,gateway.enabled=true,gateway.inferencePool=true", "a BackendTLSPolicy is for Services"),
    ("podTls.certificate=x", "/podTls"),
    ("podTls.hostname=Octavo", "/podTls/hostname"),
    ("kvEvents.enabled=true", "kvEvents.enabled needs gateway.inferencePool"),
    ("kvEvents.enabled=1", "/kvEvents/enabled"),
    ("spread.nodes=always", "/spread/nodes"),
    ("spread.nodes=require,strategy.type=surge", "would wait for a node"),
    ("autoscaling.minReplicas=9", "larger than autoscaling.maxReplicas"),
    ("autoscaling.type=hpa", "autoscaling.type needs metrics.monitor"),
    ("autoscaling.type=keda", "autoscaling.type needs metrics.monitor"),
    ("autoscaling.type=hpa,autoscaling.minReplicas=0", "cannot scale to zero"),
    ("autoscaling.type=keda,autoscaling.minReplicas=0", "only the ingress controller can count"),
    ("modelCache.size=50G", "whole Gi or Ti"),
    ("extraArgs={--port=9000}", "extraArgs: --port is set by a value of its own"),
    ("extraArgs={--shutdown_timeout=60}", "extraArgs: --shutdown-timeout is set"),
    ("gpu.runtimeClassName=Nvidia", "/gpu/runtimeClassName"),
    ("ingress.namespace=", "/ingress/namespace"),
    ("config.port=9000", "this flag is set by a value of its own"),
    ("config.scheduling-policy=fair", "config.scheduling-policy: this flag is set by a value of its own"),
    ("extraArgs={--api_keys_file=/keys}", "extraArgs: --api-keys-file is set by a value of its own"),
    ("apiKeysFile.secret=Keys", "/apiKeysFile/secret"),
    ("apiKeysFile.key=a/b", "/apiKeysFile/key"),
    ("scheduling.policy=random", "/scheduling/policy"),
    ("scheduling.minPriority=high", "/scheduling/minPriority"),
    ("scheduling.maxStepMs=-1", "/scheduling/maxStepMs"),
    ("scheduling.sharePrefixCache=1", "/scheduling/sharePrefixCache"),
    ('extraEnv[0].name=OCTAVO_MAX_MODEL_LEN,extraEnv[0].value="1"', "is ignored"),
]


@pytest.mark.parametrize(("setting", "reason"), REFUSED)
def test_bad_values_are_refused(setting: str, reason: str) -> None:
    done = render.template("--set", setting)
    assert done.returncode != 0 and reason in done.stderr, done.stderr or "it was rendered"


@pytest.mark.parametrize(("size", "disk"), [("200Gi", "204Gi"), ("1Ti", "1028Gi")])
def test_the_disk_grows_with_the_cache(size: str, disk: str) -> None:
    done = render.template("--set", f"modelCache.size={size}")
    assert done.returncode == 0, done.stderr
    (server,) = render.manifests(done.stdout).servers
    resources = server.containers[0]["resources"]
    assert [resources[kind]["ephemeral-storage"] for kind in ("requests", "limits")] == [disk, disk]


def test_a_fallback_is_within_the_bounds() -> None:
    for bounds, replicas in (("1,4", 2), ("3,4", 3), ("1,1", 1)):
        low, high = bounds.split(",")
        values = f"autoscaling.type=keda,metrics.monitor=pod,autoscaling.minReplicas={low},autoscaling.maxReplicas={high}"
        (scaled,) = render.manifests(render.template("--set", values).stdout).of("ScaledObject")
        assert scaled["spec"]["fallback"]["replicas"] == replicas


def test_another_job_has_another_name() -> None:
    """A Job cannot be changed, and an upgrade that tries to fails."""
    preload = "modelCache.type=pvc,modelCache.preload=job"
    changes = ("model=a/b", "image.tag=0.2.0", "hub.tokenSecret=other", "image.pullPolicy=Always", "imagePullSecrets[0].name=x")
    jobs = [render.manifests(render.template("--set", f"{preload},{one}").stdout).of("Job")[0] for one in ("replicas=2", *changes)]
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs)
    same = render.manifests(render.template("--set", f"{preload},replicas=3").stdout).of("Job")[0]
    assert same == jobs[0]


def test_other_names_do_not_collide() -> None:
    """Two releases in one namespace have no object and no pod in common."""
    values = render.VALUES / "production.yaml"
    found = [render.run(HELM, "template", name, render.CHART, "--values", values) for name in ("chat", "code")]
    first, second = (render.manifests(done.stdout) for done in found)
    names = [{(it["kind"], it["metadata"]["name"]) for it in m.objects} for m in (first, second)]
    assert names[0] and not names[0] & names[1]
    assert not first.behind(second.of("Service")[0])


def test_notes_tell_the_way_in() -> None:
    for name, values in render.CHARTS.items():
        arguments = ["--values", values] if values else []
        done = render.run(HELM, "install", "octavo", render.CHART, "-n", "octavo", "--dry-run=client", *arguments)
        assert done.returncode == 0, done.stderr
        notes = done.stdout.partition("NOTES:")[2]
        assert re.search(r"https?://\S+/v1/models", notes), f"{name}: {notes}"


@pytest.mark.parametrize("release", ["a.b", "0a"])
def test_a_release_needs_the_name_of_a_service(release: str) -> None:
    done = render.run(HELM, "template", release, render.CHART)
    assert done.returncode != 0 and "set fullnameOverride" in done.stderr
    assert render.run(HELM, "template", release, render.CHART, "--set", "fullnameOverride=a").returncode == 0


def test_a_quota_on_processors_can_be_met() -> None:
    """A namespace with a quota on limits.cpu admits a pod if each of its containers has a limit."""
    values = "resources.limits.cpu=16,modelCache.type=pvc,modelCache.preload={}"
    for preload in ("init", "job"):
        m = render.manifests(render.template("--set", values.format(preload)).stdout)
        assert all("cpu" in one["resources"]["limits"] for it in m.workloads for one in it.containers)
        assert sum(len(it.containers) for it in m.workloads) == 2


def test_a_cluster_can_choose_the_ids() -> None:
    ids = "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null,podSecurityContext.fsGroup=null"
    (server,) = render.manifests(render.template("--set", ids).stdout).servers
    assert server.pod["securityContext"].keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


EXTRAS = """
extraVolumes: [{name: ca, configMap: {name: ca}}]
extraVolumeMounts: [{name: ca, mountPath: /etc/ca}]
initContainers: [{name: first, image: "busybox:1.37"}]
modelCache: {type: pvc, preload: job}
priorityClassName: serving
tolerations: [{key: a, operator: Exists}]
nodeSelector: {disk: ssd}
gpu: {resourceName: nvidia.com/mig-3g.40gb}
affinity: {nodeAffinity: {}}
"""


def test_what_operators_add_is_there(tmp_path: render.pathlib.Path) -> None:
    (tmp_path / "values.yaml").write_text(EXTRAS)
    done = render.template("--values", tmp_path / "values.yaml")
    assert done.returncode == 0, done.stderr
    m = render.manifests(done.stdout)
    (server,) = m.servers
    assert [one["name"] for one in server.containers] == ["first", "octavo"]
    assert server.containers[1]["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "1"
    assert "nvidia.com/gpu" not in server.containers[1]["resources"]["limits"]
    assert server.pod["affinity"] == {"nodeAffinity": {}}
    # The Job runs where the server does, and sees the same files.
    for it in m.workloads:
        assert it.pod["nodeSelector"] == {"disk": "ssd", "nvidia.com/gpu.present": "true"}
        assert [one["key"] for one in it.pod["tolerations"]] == ["nvidia.com/gpu", "a"]
        assert it.pod["priorityClassName"] == "serving"
        assert it.volumes["ca"] and {"name": "ca", "mountPath": "/etc/ca"} in it.serving[0]["volumeMounts"]


def variables(*settings: str) -> dict[str, str]:
    """The server's variables that have a plain value."""
    done = render.template(*(word for one in settings for word in ("--set", one)))
    assert done.returncode == 0, done.stderr
    (server,) = render.manifests(done.stdout).servers
    return {one["name"]: one["value"] for one in server.serving[0]["env"] if "value" in one}


def test_scheduling_is_set_by_variables_where_it_differs_from_the_server(tmp_path: render.pathlib.Path) -> None:
    names = {"OCTAVO_SCHEDULING_POLICY", "OCTAVO_MIN_PRIORITY", "OCTAVO_MAX_STEP_MS", "OCTAVO_SHARE_PREFIX_CACHE"}
    assert not names & variables().keys()
    given = variables(
        "scheduling.policy=fair", "scheduling.minPriority=0", "scheduling.maxStepMs=0", "scheduling.sharePrefixCache=true"
    )
    assert [given[name] for name in sorted(names)] == ["0", "0", "fair", "true"]
    # Helm reads the numbers of a file as floats.
    (tmp_path / "values.yaml").write_text("scheduling: {minPriority: -12345678, maxStepMs: 1000000}")
    text = render.template("--values", tmp_path / "values.yaml").stdout
    assert 'value: "-12345678"' in text and 'value: "1000000"' in text


def test_a_keys_file_is_mounted_so_that_it_follows_its_secret() -> None:
    done = render.template("--set", "apiKeysFile.secret=team-keys,apiKeysFile.key=clients.yaml")
    (server,) = render.manifests(done.stdout).servers
    assert server.volumes["api-keys"]["secret"] == {
        "secretName": "team-keys",
        "items": [{"key": "clients.yaml", "path": "clients.yaml"}],
    }
    (mount,) = (one for one in server.serving[0]["volumeMounts"] if one["name"] == "api-keys")
    assert mount == {"name": "api-keys", "mountPath": "/etc/octavo-keys", "readOnly": True}
    given = variables("apiKeysFile.secret=team-keys", "apiKeysFile.key=clients.yaml")
    assert given["OCTAVO_API_KEYS_FILE"] == "/etc/octavo-keys/clients.yaml"
    notes = render.run(HELM, "install", "octavo", render.CHART, "-n", "octavo", "--dry-run=client",
                       "--set", "apiKeysFile.secret=team-keys").stdout
    assert "with a key of the secret team-keys." in notes


def test_the_component_of_a_keys_file_is_that_of_the_chart(tmp_path: render.pathlib.Path) -> None:
    lines = ["resources: [octavo.yaml]", "components: [api-keys-file]"]
    shutil.copytree(render.COMPONENTS / "api-keys-file", tmp_path / "api-keys-file")
    (tmp_path / "octavo.yaml").write_text(render.template().stdout)
    (tmp_path / "kustomization.yaml").write_text("\n".join(lines))
    (own,) = render.manifests(render.kustomize(tmp_path)).servers
    (chart,) = render.manifests(render.template("--set", "apiKeysFile.secret=octavo-keys").stdout).servers
    for server in (own, chart):
        assert environment(server.containers[0])["OCTAVO_API_KEYS_FILE"]["value"] == "/etc/octavo-keys/keys.yaml"
    assert own.volumes["api-keys"] == chart.volumes["api-keys"]
    mounts = [[one for one in it.containers[0]["volumeMounts"] if one["name"] == "api-keys"] for it in (own, chart)]
    assert mounts[0] == mounts[1] != []


@pytest.mark.parametrize("provider", ["none", "gke", "istio"])
def test_notes_install_the_picker_for_the_gateway(provider: str) -> None:
    values = ["--values", render.VALUES / "routing.yaml", "--set", f"gateway.provider={provider}"]
    done = render.run(HELM, "install", "octavo", render.CHART, "-n", "octavo", "--dry-run=client", *values)
    notes = done.stdout.partition("NOTES:")[2]
    assert f"--set provider.name={provider}" in notes and "charts/llm-d-router-gateway" in notes, done.stderr
