"""The OpenAI SDK for Node: its tests run under Node, against the tiny model."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = pathlib.Path(os.environ.get("OCTAVO_NODE_MODULES", ROOT / "target" / "ci-node" / "node_modules"))


def test_openai_for_node(tiny_url):
    if not (MODULES / "openai").is_dir() or shutil.which("node") is None:
        assert os.environ.get("OCTAVO_REQUIRE_NODE") != "1", f"no Node, or no package openai in {MODULES}"
        pytest.skip("NO NODE: its client was not tested")
    environment = {**os.environ, "NODE_PATH": str(MODULES), "OCTAVO_URL": tiny_url}
    tests = sorted((pathlib.Path(__file__).parent / "node").glob("*.test.cjs"))
    run = subprocess.run(["node", "--test", *tests], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# fail 0" in run.stdout and "# pass 8" in run.stdout, run.stdout
