"""What the Kubernetes component `otel` sets, given to the real server: its traces arrive, and its lines are JSON."""

import json
import uuid

import pytest
import yaml

from places import DEPLOY
from serving import serving

ENVIRONMENT = DEPLOY / "k8s" / "components" / "otel" / "environment.yaml"
# What the kubelet fills in.
FIELDS = {"metadata.name": "octavo-7d9f-x2x", "metadata.namespace": "serve", "spec.nodeName": "node-3"}


@pytest.fixture(scope="module")
def variables():
    """The container's environment, with what refers to other variables put in."""
    pod = yaml.safe_load(ENVIRONMENT.read_text())["spec"]["template"]["spec"]
    found = {}
    for variable in pod["containers"][0]["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        value = FIELDS[field] if field else variable["value"]
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        assert "$(" not in value, f"{variable['name']} refers to what is set later, or nowhere"
        found[variable["name"]] = value
    return found


def test_spans_arrive_with_the_pod_s_name(variables, collector):
    endpoint = variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    # 4317 is the port of gRPC, and gRPC what is spoken unless a variable says otherwise.
    assert endpoint == "http://otel-collector.observability:4317" and "OTEL_EXPORTER_OTLP_PROTOCOL" not in variables
    given = {**variables, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.addresses["grpc"]}
    with serving(**given) as server:
        trace, dropped, request_id = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex
        body = {"prompt": "x", "max_tokens": 2}
        # A trace that its beginner does not record is not recorded here; one that it does is, whatever the ratio.
        assert server.ask(body, traceparent=f"00-{dropped}-{'1' * 16}-00")[0] == 200
        assert server.ask(body, traceparent=f"00-{trace}-{'2' * 16}-01", x_request_id=request_id)[0] == 200
        span = collector.span(request_id)
        assert span["Trace ID"] == trace
        names = ("service.name", "k8s.pod.name", "k8s.namespace.name", "k8s.node.name")
        assert [span["resource"][name] for name in names] == ["octavo", *FIELDS.values()]
        assert not [span for span in collector.spans() if span.get("Trace ID") == dropped]
    assert all(isinstance(json.loads(line), dict) for line in server.log)
