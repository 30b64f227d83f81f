"""Schemas of the custom resources, which validation against Kubernetes' own schemas knows nothing of.

KEDA and the Prometheus operator: models generated from their CRDs; they ignore unknown fields, so what comes out must
be what went in. Gateway API: what we use of it, written down from its reference, with no field besides.
"""

from typing import Any

import jsonschema
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, ServiceMonitor

from manifests import Object, at

MODELS = {it.__name__: it for it in (ScaledObject, ServiceMonitor, PodMonitor)}


def strict(required: list[str], **properties: Any) -> Object:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def several(item: Any) -> Object:
    return {"type": "array", "minItems": 1, "items": item}


TEXT = {"type": "string", "minLength": 1}
HOST = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}

GATEWAY = strict(
    ["gatewayClassName", "listeners"],
    gatewayClassName=TEXT,
    listeners=several(
        strict(
            ["name", "port", "protocol"],
            name=TEXT,
            hostname=HOST,
            port=PORT,
            protocol={"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
            tls=strict(
                [], mode={"enum": ["Terminate", "Passthrough"]}, certificateRefs=several(strict(["name"], name=TEXT))
            ),
            allowedRoutes=strict([], namespaces=strict([], **{"from": {"enum": ["All", "Same", "Selector"]}})),
        )
    ),
)
ROUTE = strict(
    ["parentRefs", "rules"],
    parentRefs=several(strict(["name"], name=TEXT, sectionName=TEXT)),
    hostnames=several(HOST),
    rules=several(
        strict(
            [],
            matches=several(
                strict(
                    [],
                    path=strict(
                        ["type", "value"],
                        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value={"type": "string", "pattern": "^/"},
                    ),
                )
            ),
            filters=several(
                strict(
                    ["type"],
                    type={"const": "RequestRedirect"},
                    requestRedirect=strict(
                        [], scheme={"enum": ["http", "https"]}, statusCode={"enum": [301, 302, 303, 307, 308]}
                    ),
                )
            ),
            backendRefs=several(strict(["name"], group=TEXT, kind=TEXT, name=TEXT, port=PORT)),
            timeouts=strict([], request=DURATION, backendRequest=DURATION),
        )
    ),
)
REFERENCE = {"group": {"const": ""}, "name": TEXT}
BACKEND_TLS = strict(
    ["targetRefs", "validation"],
    targetRefs=several(strict(["group", "kind", "name"], **REFERENCE, kind={"const": "Service"}, sectionName=TEXT)),
    validation=strict(
        ["hostname"],
        hostname={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"},
        caCertificateRefs=several(strict(["group", "kind", "name"], **REFERENCE, kind={"enum": ["ConfigMap", "Secret"]})),
        wellKnownCACertificates={"const": "System"},
    ),
)
# What fallback.behavior may be since KEDA 2.17, which the models are older than.
FALLBACKS = {"static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"}
SPECS = {"Gateway": GATEWAY, "HTTPRoute": ROUTE, "BackendTLSPolicy": BACKEND_TLS}
KINDS = MODELS.keys() | SPECS.keys()


def validate(it: Object) -> None:
    """Raises ValueError if a custom resource is not what its schema allows."""
    if it["kind"] in SPECS:
        try:
            jsonschema.validate(it["spec"], SPECS[it["kind"]])
        except jsonschema.ValidationError as error:
            raise ValueError(error.message) from error
        return
    if "behavior" in (fallback := at(it, "spec", "fallback", default={})):
        if fallback["behavior"] not in FALLBACKS:
            raise ValueError(f"fallback.behavior cannot be {fallback['behavior']}")
        plain = {key: value for key, value in fallback.items() if key != "behavior"}
        it = {**it, "spec": {**it["spec"], "fallback": plain}}
    known = MODELS[it["kind"]].model_validate(it).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if known["spec"] != it["spec"]:
        raise ValueError(f"of {it['spec']} only {known['spec']} is understood")
