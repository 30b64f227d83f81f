"""What it costs to be scraped twenty times a second, as the endpoint picker of an inference gateway does."""

import http.client
import pathlib
import statistics
import time

from processes import SMALL, serving

RATE = 20
WINDOWS = 3
SECONDS = 2
# The aim is 1 % of a core in a release build. A debug build costs thrice as much and the machine may be busy: what fails the
# test is more than both together explain.
LIMIT = 0.06


def processor_seconds(pid):
    """Time that the threads of a process have computed, from the scheduler's nanoseconds."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def scrape(connection):
    """Seconds until the page was there, and its bytes."""
    asked = time.monotonic()
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    size = len(response.read())
    assert response.status == 200
    return time.monotonic() - asked, size


def window(pid, connection):
    """The share of a core that the server used, the seconds of each answer, the bytes of a page."""
    begin, before = time.monotonic(), processor_seconds(pid)
    times = []
    for turn in range(RATE * SECONDS):
        time.sleep(max(0.0, begin + turn / RATE - time.monotonic()))
        seconds, size = scrape(connection)
        times.append(seconds)
    time.sleep(max(0.0, begin + SECONDS - time.monotonic()))
    return (processor_seconds(pid) - before) / (time.monotonic() - begin), times, size


def test_twenty_scrapes_a_second(model, tmp_path, record_property):
    with serving(model, tmp_path / "octavo.log", *SMALL) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        windows = [window(server.process.pid, connection) for _ in range(WINDOWS)]
        connection.close()
    # Neighbours on the machine can only add to it: the least disturbed window is the nearest to what it costs.
    share, times, size = min(windows)
    print(
        f"\n{RATE} scrapes/s of {size} bytes: {share:.2%} of a core, {share / RATE * 1e3:.2f} ms each,"
        f" answered in {statistics.median(times) * 1e3:.2f} ms (median), {max(times) * 1e3:.1f} ms (longest)"
    )
    record_property("share_of_a_core", share)
    assert share < LIMIT
