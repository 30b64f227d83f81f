"""The scripts of .ci: a run with something missing fails, and names it."""

import pathlib
import subprocess

import pytest

from places import ROOT

APT = "#!/bin/sh\necho no such package >&2\nexit 100\n"


def prelude(tmp_path: pathlib.Path, command: str) -> subprocess.CompletedProcess:
    """A function of .ci/prelude, where apt-get installs nothing and there are only the programs of a bare system."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "sh").symlink_to("/bin/sh")
    (programs / "apt-get").write_text(APT)
    (programs / "apt-get").chmod(0o755)
    script = f"source .ci/prelude\n{command}\necho went on"
    return subprocess.run(["/usr/bin/bash", "-c", script], cwd=ROOT, env={"PATH": str(programs)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("browser", ["chromium-headless-shell (package chromium-headless-shell)"]),
        ("node_client", ["node (package nodejs)", "npm (package npm)"]),
        # Without the programs that have an installer of their own.
        ("bash() { :; }; deploy_tools", ["buildah", "crun", "busybox (package busybox-static)", "strace", "pgrep", "systemd-analyze"]),
    ],
    ids=["browser", "node", "deploy"],
)
def test_what_is_missing_fails_by_name(tmp_path, function, names):
    done = prelude(tmp_path, function)
    assert done.returncode != 0 and "went on" not in done.stdout
    for name in names:
        assert f"required and not installed: {name}" in done.stderr, done.stderr


def test_what_is_there_is_not_installed(tmp_path):
    done = prelude(tmp_path, "programs bash=bash sh=dash")
    assert done.returncode == 0 and done.stdout == "went on\n" and not done.stderr
