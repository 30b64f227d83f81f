"""The examples, the monitoring objects and the values of other charts, held against the real schemas."""

import json
import pathlib

import pytest

import render
from conftest import APPLIED
from control_plane import Api, Refused
from manifests import parse
from places import MONITORING
from test_compositions import moved

EXAMPLES = render.DEPLOY / "examples"
FILES = [EXAMPLES / "run-batch.yaml", EXAMPLES / "kserve.yaml", MONITORING / "prometheusrule.yaml", MONITORING / "dcgm-servicemonitor.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda it: it.name)
def test_an_example_is_accepted(path: pathlib.Path, api: Api, namespace) -> None:
    where = namespace()
    objects = moved(parse(path.read_text()), where)
    for it in objects:
        it["metadata"]["namespace"] = where
    api.apply("\n---\n".join(map(json.dumps, objects)), where)
    APPLIED["compositions"] += 1
    APPLIED["objects"] += len(objects)


@pytest.mark.parametrize("path", FILES[1:], ids=lambda it: it.name)
def test_its_schema_is_there(path: pathlib.Path, api: Api, namespace) -> None:
    """An unknown field is refused, so what is accepted is what the CRD knows."""
    (it, *_) = moved(parse(path.read_text()), namespace())
    it["spec"]["unknown"] = 1
    with pytest.raises(Refused, match="unknown"):
        api.apply(json.dumps(it), it["metadata"]["namespace"])
