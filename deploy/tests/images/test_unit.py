"""The unit for systemd: valid, confined, and no stricter than the server can bear."""

import os
import re
import shlex
import subprocess

import yaml

from conftest import SMALL, ask, healthy, octavo, tool, wait_until
from places import DEPLOY, OCTAVO, TINY, free_port

UNIT = DEPLOY / "systemd" / "octavo.service"


def test_the_unit_is_valid_and_confined(tmp_path):
    analyze = tool("systemd-analyze")
    unit = tmp_path / "octavo.service"

    def verify(text):
        unit.write_text(text.replace("/usr/local/bin/octavo", str(OCTAVO.resolve())))
        return subprocess.run([analyze, "verify", unit], capture_output=True, text=True).stderr

    def exposure(text):
        unit.write_text(text)
        command = [analyze, "security", "--offline=true", "--threshold=20", unit]
        return subprocess.run(command, capture_output=True, text=True).returncode

    text = UNIT.read_text()
    assert verify(text) == ""
    assert "LimitNOFILES" in verify(text.replace("LimitNOFILE=", "LimitNOFILES="))
    assert exposure(text) == 0
    assert exposure(text.replace("SystemCallFilter=", "#").replace("ProtectSystem=", "#")) != 0


def test_the_unit_leaves_time_to_finish_and_its_configuration_is_understood():
    text = UNIT.read_text()
    settings = dict(re.findall(r"^(\w+)=(.+)$", text, re.M))
    config = DEPLOY / "systemd" / "octavo.yaml"
    start = shlex.split(settings["ExecStart"])
    assert start == ["/usr/local/bin/octavo", "serve", "--config", f"/etc/octavo/{config.name}"]
    flags = yaml.safe_load(config.read_text())
    assert float(settings["TimeoutStopSec"]) >= flags["shutdown-timeout"] + 15
    assert settings["Restart"] == "on-failure" and int(settings["LimitNOFILE"]) >= 65536
    refused = octavo("serve", "/no/such/model", "--config", config, "--port", "0")
    assert refused.returncode == 1 and "/no/such/model" in refused.stderr, refused.stderr


def filtered():
    """The system calls of each of systemd's groups."""
    groups, group = {}, None
    shown = subprocess.run([tool("systemd-analyze"), "--no-pager", "syscall-filter"], capture_output=True, text=True)
    for line in shown.stdout.splitlines():
        if line.startswith("@"):
            group = groups.setdefault(line.strip(), set())
        elif line.strip() and not line.strip().startswith("#"):
            group.add(line.strip())

    def flat(name):
        return {name} if not name.startswith("@") else set().union(*map(flat, groups[name]))

    return flat


def test_the_unit_allows_what_the_server_does(tmp_path):
    """It cannot be started here: what the server asks the kernel for is held against what the unit lets through."""
    port = free_port()
    trace = tmp_path / "trace"
    command = [tool("strace"), "-f", "-qq", "-o", trace, OCTAVO, "serve", TINY, "--port", str(port), "--shutdown-lag", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=SMALL)
    try:
        wait_until(lambda: healthy(port), server)
        request = {"prompt": "Once", "max_tokens": 4, "stream": True}
        assert ask(f"http://127.0.0.1:{port}/v1/completions", request)[0] == 200
        child = int(subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout)
        os.kill(child, 15)
        assert server.wait(timeout=40) == 0
    finally:
        server.kill()
        server.communicate()
    lines = trace.read_text().splitlines()
    called = {found[1] for line in lines if (found := re.match(r"\d+\s+(\w+)\(", line))}
    assert len(called) > 30 and "setpriority" in called

    flat = filtered()
    rules = re.findall(r"^SystemCallFilter=(~?)(@[\w-]+)$", UNIT.read_text(), re.M)
    allowed = flat("@default").union(*(flat(group) for denied, group in rules if not denied))
    denied = set().union(*(flat(group) for denied, group in rules if denied)) - flat("@default")
    assert rules and not called - (allowed - denied), called - (allowed - denied)
    families = {found[1] for line in lines if (found := re.search(r"socket(?:pair)?\((AF_\w+)", line))}
    assert families <= set(re.search(r"^RestrictAddressFamilies=(.*)$", UNIT.read_text(), re.M)[1].split())
    # MemoryDenyWriteExecute
    assert not [line for line in lines if "PROT_WRITE|PROT_EXEC" in line]
