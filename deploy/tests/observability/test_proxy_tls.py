"""nginx that speaks TLS to the server and checks its certificate, as the chart's value podTls has it."""

import time

import pytest
import trustme

import client
from nginx import proxying
from serving import serving


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = trustme.CA()
    file = tmp_path_factory.mktemp("authority") / "ca.crt"
    authority.cert_pem.write_to_path(file)
    return authority, file


@pytest.fixture(scope="module")
def server(model, authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    issued = authority[0].issue_cert("octavo")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    issued.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    flags = ["--max-model-len", "65536", "--num-gpu-blocks-override", "4100", "--stream-interval", "50"]
    files = ["--ssl-certfile", folder / "tls.crt", "--ssl-keyfile", folder / "tls.key"]
    with serving(*flags, *files, model=model) as server:
        yield server


@pytest.fixture
def status(server, tmp_path):
    """The status of an answer through a proxy that speaks TLS, or does not."""

    def ask(tls):
        with proxying(tmp_path / "nginx", [server.port], tls=tls) as nginx:
            return client.post(nginx.port, client.body("Hello", 4))[0]

    return ask


def test_streams_pass_over_tls(server, authority, tmp_path):
    assert server.url.startswith("https://")
    with proxying(tmp_path / "nginx", [server.port], tls={"authority": authority[1], "name": "octavo"}) as nginx:
        tokens = 4_000
        times = client.stream(nginx.port, "Tell me a long story", tokens).times
        assert len(times) >= tokens // 50
        assert times[-1] > 0.2, "too quick to tell"
        assert times[0] < 0.2 * times[-1] and 0.2 * times[-1] < times[len(times) // 2] < 0.8 * times[-1]
        # Over the connection that is open already.
        assert client.post(nginx.port, client.body("Hello", 4))[0] == 200


def test_a_proxy_that_speaks_no_tls_is_told_so_at_once(status):
    begun = time.monotonic()
    assert status(None) == 400
    assert time.monotonic() - begun < 5, "it waited for an answer of HTTP/0.9 to end"


def test_a_certificate_of_another_authority_is_refused(status, tmp_path):
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.crt")
    assert status({"authority": tmp_path / "other.crt", "name": "octavo"}) == 502


def test_a_certificate_of_another_name_is_refused(status, authority):
    assert status({"authority": authority[1], "name": "octavo.example.com"}) == 502
