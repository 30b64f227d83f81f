"""The metrics page under load, read by a strict parser of ours and by Prometheus' Python client."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

import client
from exposition import FormatError, families
from processes import get, until
from serving import serving


@pytest.fixture(scope="module")
def page(model):
    with serving(*client.MixedLoad.FEW_BLOCKS, model=model) as server, client.MixedLoad(server.port):
        until("preemptions", lambda: server.metric("vllm:num_preemptions_total") > 0)
        until("aborts", lambda: server.metric("vllm:request_success_total", finished_reason="abort") > 0)
        status, text = get(f"{server.url}/metrics")
    assert status == 200
    return text


def test_the_page_is_strictly_well_formed(page):
    found = families(page)
    assert len(found) > 35
    assert {"counter", "gauge", "histogram", "summary"} == {family.kind for family in found.values()}


def test_the_parsers_agree(page):
    ours = {}
    for family in families(page).values():
        ours.update(family.samples)
    theirs = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            theirs[(sample.name, frozenset(sample.labels.items()))] = sample.value
    assert ours == theirs


GOOD = """\
# HELP a_total A.
# TYPE a_total counter
a_total{x="1",y="q\\"\\\\\\n"} 1
a_total{x="2",y=""} 2.5e+3

# HELP h H.
# TYPE h histogram
h_bucket{le="1.0"} 1
h_bucket{le="+Inf"} 2
h_sum 3.5
h_count 2
"""


def test_a_good_page_is_read():
    found = families(GOOD)
    assert found["a_total"].samples[("a_total", frozenset({("x", "1"), ("y", 'q"\\\n')}))] == 1
    assert found["h"].samples[("h_sum", frozenset())] == 3.5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n", "\r\n"),
        ("h_count 2\n", "h_count 2"),
        ("# TYPE a_total counter\n", ""),
        ("# HELP a_total A.\n", ""),
        ("# TYPE a_total counter\n", "# TYPE a_total counter\n# TYPE a_total counter\n"),
        ("# TYPE a_total counter", "# TYPE a_total count"),
        ("a_total", "a"),
        ('x="2",y=""', 'x="1",y="q\\"\\\\\\n"'),
        ('x="2",y=""', 'x="2",x=""'),
        ('x="2",y=""', 'x="2",y="",'),
        ('x="2",y=""', 'x="2" y=""'),
        ('x="2",y=""', 'pod="2"'),
        ("2.5e+3", "2.5k"),
        ("2.5e+3", "-1"),
        ("2.5e+3", "1 1795335589"),
        ('h_bucket{le="1.0"} 1', 'h_bucket{le="1.0"} 3'),
        ('h_bucket{le="+Inf"} 2\n', ""),
        ("h_sum 3.5\n", ""),
        ("h_count 2", "h_count 3"),
        ("h_count 2\n", "h_count 2\na_total 3\n"),
        ("h_count 2\n", "h_count 2\n# HELP a_total Again.\n# TYPE a_total counter\na_total 3\n"),
    ],
)
def test_what_another_reader_would_refuse_is_refused(old, new):
    assert old in GOOD
    with pytest.raises(FormatError):
        families(GOOD.replace(old, new))
