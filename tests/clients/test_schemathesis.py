"""What /openapi.json says is what the server does: requests made from it, right and wrong ones, never break anything."""

import copy
import json
import os
import urllib.request

import hypothesis
import openapi_spec_validator
import pytest
import requests
import schemathesis
from schemathesis import checks

from conftest import ROOT, serving

# Requests for each route that takes a body, and for each of the others.
MANY, FEW = int(os.environ.get("OCTAVO_API_CASES", 60)), 4

# Without these a random request may ask for as much as the context holds, some hundred times over.
CAPS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 3, "min_tokens": 4}

# Token ids of the tiny model.
VOCABULARY = 320

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


# Development routes after which the engine serves no request until it is resumed.
HALTING = ["POST /pause", "POST /sleep"]


@pytest.fixture(scope="module")
def tiny_url():
    """A server of its own, with every route: the development routes stop the engine, and responses are stored."""
    # Left to itself the model would fill an answer in JSON with blanks and with keys of its own.
    terse = '{"disable_any_whitespace": true, "disable_additional_properties": true}'
    flags = ["--structured-outputs-config", terse, "--enable-tokenizer-info-endpoint"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with serving(ROOT / "models" / "testdata" / "llama", "--served-model-name", "tiny", *flags) as url:
            yield url


@pytest.fixture(scope="module")
def document(tiny_url):
    with urllib.request.urlopen(f"{tiny_url}/openapi.json") as response:
        return json.load(response)


def know_tokens(node):
    """Makes every list of integers one of tokens that the model has: with others hardly a request would be served."""
    if isinstance(node, dict):
        items = node.get("items")
        if isinstance(items, dict) and items.get("type") == "integer":
            items["maximum"] = VOCABULARY - 1
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            know_tokens(part)


@pytest.fixture(scope="module")
def operations(document, tiny_url):
    capped = copy.deepcopy(document)
    for schema in capped["components"]["schemas"].values():
        for name, cap in CAPS.items():
            if "integer" in schema.get("properties", {}).get(name, {}).get("type", ()):
                schema["properties"][name]["maximum"] = cap
        if "max_tokens" in schema.get("properties", {}):
            schema["required"] = [*schema.get("required", []), "max_tokens"]
    know_tokens(capped["components"]["schemas"])
    # The other levels are refused with 501.
    capped["paths"]["/sleep"]["post"]["parameters"][0].update(required=True, schema={"type": "integer", "enum": [0]})
    # A response that is stored, until it is deleted, and one that is not. It is found only without credentials.
    capped.pop("security")
    asked = requests.post(f"{tiny_url}/v1/responses", json={"input": "Well?", "max_output_tokens": 1}, timeout=60)
    for path, item in capped["paths"].items():
        if "{response_id}" in path:
            for operation in item.values():
                operation["parameters"][0]["schema"]["enum"] = [asked.json()["id"], "resp_0"]
    # The only name that is served, beside the absent one.
    capped["components"]["schemas"]["Model"]["enum"] = [None, "tiny"]
    schema = schemathesis.openapi.from_dict(capped)
    schema.config.update(base_url=tiny_url)
    return [result.ok() for result in schema.get_all_operations()]


def test_the_document_is_valid(document):
    assert document["openapi"] == "3.1.0"
    openapi_spec_validator.validate(document)


def run(operation, mode, examples, session):
    """Sends requests and counts the answers by status. An engine that a request has stopped is resumed."""
    answers = {}
    resume = operation.label in HALTING

    @hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def check(case):
        try:
            response = case.call_and_validate(session=session, checks=CHECKS, timeout=60)
        finally:
            if resume:
                session.post(f"{operation.base_url}/resume", timeout=60).raise_for_status()
        answers[response.status_code] = answers.get(response.status_code, 0) + 1

    check()
    return answers


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_requests_are_answered_as_documented(operations, tiny_url, mode):
    report = {}
    with requests.Session() as session:
        for operation in operations:
            takes_body = len(operation.body) > 0
            if mode == schemathesis.GenerationMode.NEGATIVE and not takes_body:
                continue  # There is nothing to get wrong.
            report[operation.label] = run(operation, mode, MANY if takes_body else FEW, session)
        assert session.get(f"{tiny_url}/health").status_code == 200, "the server broke"
    print(json.dumps(report, indent=1))
    for label, answers in report.items():
        assert answers and all(status < 500 for status in answers), (label, answers)
    chat = report["POST /v1/chat/completions"]
    if mode == schemathesis.GenerationMode.POSITIVE:
        assert chat.get(200), "no request of the document's was served"
    else:
        assert chat.get(400, 0) > MANY // 2, "what contradicts the document was taken"
