"""The examples: objects that are valid, command lines that the binary understands, and names that agree."""

import json
import pathlib
import subprocess

import kubernetes_validate
import pytest
import yaml

import lint_operation  # noqa: F401  (its rules join those of lint)
import render
from lint import RULES, World
from manifests import Manifests, Object, parse
from places import TINY

EXAMPLES = render.DEPLOY / "examples"
# The rules for anything that runs pods; the others are about servers and their surroundings.
RULES_OF_JOBS = ["names", "enums", "mounts-have-volumes", "variables-are-defined", "quantities", "resources-are-bounded",
                 "disk-holds-the-volumes", "images-are-pinned", "pods-are-restricted", "read-only-root-has-room",
                 "secrets-stay-secret", "network-is-closed", "no-service-links", "jobs-outlive-a-change"]  # fmt: skip


def objects(name: str) -> list[Object]:
    return parse((EXAMPLES / name).read_text())


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_batch_job_is_valid(version: str) -> None:
    for it in objects("run-batch.yaml"):
        kubernetes_validate.validate(it, version, strict=True)


@pytest.mark.parametrize("rule", RULES_OF_JOBS)
def test_the_batch_job_passes_the_lint(rule: str, world: World) -> None:
    assert list(RULES[rule](Manifests(objects("run-batch.yaml")), world)) == []


def test_the_batch_job_answers_its_file(octavo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its command line, with the model and the device that are here."""
    (container,) = Manifests(objects("run-batch.yaml")).workloads[0].containers
    body = {"model": "qwen3-8b", "prompt": "a", "max_tokens": 2}
    line = {"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    words = [word.replace("/batch", str(tmp_path)).replace("Qwen/Qwen3-8B", str(TINY)) for word in container["args"]]
    words[words.index("--device=cuda")] = "--device=cpu"
    done = subprocess.run([octavo, *words], env={"OCTAVO_CPU_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"status_code":200' in (tmp_path / "answers.jsonl").read_text()


def test_the_runtime_of_kserve_starts(octavo: pathlib.Path, world: World) -> None:
    runtime, service = objects("kserve.yaml")
    (container,) = runtime["spec"]["containers"]
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    formats = {it["name"] for it in runtime["spec"]["supportedModelFormats"]}
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in world.routes
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["containerPort"] == 8000
    # KServe puts the name of the service in.
    words = [word.replace("{{.Name}}", service["metadata"]["name"]).replace("cuda", "cpu") for word in container["args"]]
    words += ["--host=127.0.0.1", "--port=0"]
    done = subprocess.run([octavo, *words], env={"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "/mnt/models" in done.stderr, done.stderr


def test_litellm_asks_the_chart_s_service(renderings: dict[str, Manifests]) -> None:
    (entry,) = yaml.safe_load((EXAMPLES / "litellm.yaml").read_text())["model_list"]
    (service,) = renderings["helm base"].of("Service")
    where = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    assert entry["litellm_params"]["api_base"] == f"http://{where}/v1"
    (config,) = renderings["helm base"].of("ConfigMap")
    served = yaml.safe_load(config["data"]["config.yaml"])["served-model-name"]
    assert entry["litellm_params"]["model"] == f"hosted_vllm/{served}" and entry["model_name"] == served
