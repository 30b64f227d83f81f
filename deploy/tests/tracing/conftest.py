"""One collector for all tests, and one server for each way to it."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from collector import Collector  # noqa: E402
from serving import serving  # noqa: E402


@pytest.fixture(scope="session")
def collector(tmp_path_factory):
    collector = Collector(tmp_path_factory.mktemp("rotel"))
    yield collector
    collector.stop()


@pytest.fixture(scope="session", params=["grpc", "http/protobuf"])
def protocol(request):
    return request.param


@pytest.fixture(scope="session")
def server(collector, protocol):
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        "OTEL_SERVICE_NAME": "checkout",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test,service.name=overruled",
    }
    with serving("--otlp-traces-endpoint", collector.addresses[protocol], **variables) as server:
        yield server
