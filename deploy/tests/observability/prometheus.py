"""A Prometheus of one's own."""

import contextlib
import json
import math
import urllib.parse

import yaml

from places import free_port
from processes import get, program, running


class Prometheus:
    """Where to ask it."""

    def __init__(self, url):
        self.url = url

    def api(self, path, **parameters):
        """The `data` of an answer; an error fails the test with Prometheus' own words."""
        status, text = get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert status == 200, text
        return json.loads(text)["data"]

    def query(self, expression):
        """(labels, value) of each series."""
        data = self.api("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(item["metric"], float(item["value"][1])) for item in data["result"]]

    def value(self, expression):
        """The one value of an expression, 0 if there is none yet."""
        values = [value for _, value in self.query(expression) if math.isfinite(value)]
        assert len(values) <= 1, values
        return values[0] if values else 0.0


@contextlib.contextmanager
def scraping(folder, jobs, *, rules=(), alertmanager=None):
    """Prometheus inside the block. `jobs` are (name, address, labels); scrapes and rules come every second."""
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [{"targets": [address], "labels": labels} for address, labels in targets],
            }
            for name, targets in jobs.items()
        ],
    }
    if alertmanager:
        managers = [{"static_configs": [{"targets": [alertmanager]}]}]
        configuration["alerting"] = {"alertmanagers": managers}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = [
        program("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log", f"http://127.0.0.1:{port}/-/ready"):
        yield Prometheus(f"http://127.0.0.1:{port}")
