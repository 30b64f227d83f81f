"""The workflows: valid, without known weaknesses, and in step with the files that they call."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from places import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SCRIPTS = sorted((ROOT / "deploy" / "release").glob("*.sh"))


def tool(name, *arguments, **options):
    path = shutil.which(name, path=str(pathlib.Path(sys.executable).parent))
    assert path, f"{name} is not installed"
    return subprocess.run([path, *arguments], capture_output=True, text=True, **options)


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


def scripts(workflow):
    return [step["run"] for job in jobs(workflow).values() for step in job["steps"] if "run" in step]


def test_workflows_match_their_schema(tmp_path):
    schema = ["--builtin-schema", "vendor.github-workflows"]
    checked = tool("check-jsonschema", *schema, *WORKFLOWS)
    assert checked.returncode == 0, checked.stdout
    spoiled = tmp_path / "spoiled.yml"
    spoiled.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert tool("check-jsonschema", *schema, spoiled).returncode != 0


def test_workflows_have_no_weakness_that_zizmor_knows(tmp_path):
    command = ["--offline", "--no-progress", "--color", "never"]
    checked = tool("zizmor", *command, *WORKFLOWS)
    assert checked.returncode == 0, checked.stdout
    spoiled = tmp_path / "spoiled.yml"
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    spoiled.write_text(text.replace('"$GITHUB_REF_NAME" =', "${{ github.ref_name }} ="))
    assert spoiled.read_text() != text
    assert "template-injection" in tool("zizmor", *command, spoiled).stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_wait_for_jobs_that_are_there(workflow):
    names = jobs(workflow)
    for job in names.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(names)
        assert job["permissions"] if "permissions" in job else yaml.safe_load(workflow.read_text())["permissions"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_of_workflows_are_shell(workflow, tmp_path):
    for number, script in enumerate(scripts(workflow)):
        path = tmp_path / f"{number}.sh"
        path.write_text("#!/usr/bin/env bash\nset -e\n" + script)
        checked = tool("shellcheck", path)
        assert checked.returncode == 0, checked.stdout


def test_build_script_passes_shellcheck():
    assert SCRIPTS
    checked = tool("shellcheck", *SCRIPTS)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_files_that_workflows_name_are_there(workflow):
    named = {word for script in scripts(workflow) for word in re.findall(r"(?<![\w/])(?:deploy|\.ci)/[\w./-]+", script)}
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_workflows_compile_with_the_rust_of_the_images():
    """The packages and the images are made by the same compiler, on the same C library."""
    image = re.search(r"^ARG BUILD_IMAGE=docker.io/library/rust:([\d.]+)-slim-(\w+)", DOCKERFILE, re.M)
    for workflow in WORKFLOWS:
        for found in re.findall(r"docker.io/library/rust:(\S+)", workflow.read_text()):
            assert found == f"{image[1]}-{image[2]}"


def test_the_targets_of_the_workflow_are_those_of_the_dockerfile():
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.M))
    matrix = jobs(ROOT / ".github" / "workflows" / "release.yml")["images"]["strategy"]["matrix"]["include"]
    targets = {target for entry in matrix for target in entry["targets"].split()}
    assert targets == {"cpu", "slim", "full"}
    assert targets <= stages
