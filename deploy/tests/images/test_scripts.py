"""The scripts for other platforms, run: the platform's own command is a stand-in that notes or does what it was asked."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from conftest import SMALL, ask, running
from places import DEPLOY, OCTAVO, TINY, free_port

# Writes its arguments to $NOTED.
NOTE = """#!{python}
import json, os, sys
open(os.environ["NOTED"], "w").write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
"""

# `enroot start [--mount SOURCE:TARGET] [--env NAME] IMAGE COMMAND...`: the command in its place, with the paths of the
# container turned into those of the host, and after the image's entry point, as the start script of an image has it.
ENROOT = """#!{python}
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["start"])
parser.add_argument("--mount", action="append", default=[])
parser.add_argument("--env", action="append", default=[])
parser.add_argument("image")
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
assert os.path.exists(given.image), given.image
open(os.path.join(os.environ["TMPDIR"], "environment"), "w").write("".join(f"{{name}}={{os.environ.get(name, '')}}\\n" for name in given.env))
command = given.command
for source, target in (mount.split(":") for mount in given.mount):
    assert os.path.isdir(source), source
    command = [source + word[len(target):] if word.startswith(target + "/") else word for word in command]
os.execv({octavo!r}, [{octavo!r}, *command])
"""


@pytest.fixture
def platform(tmp_path):
    """Runs a script where ovhai and enroot are stand-ins."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in [("ovhai", NOTE), ("enroot", ENROOT)]:
        program = programs / name
        program.write_text(text.format(python=sys.executable, octavo=str(OCTAVO.resolve())))
        program.chmod(0o755)

    def environment(**variables):
        base = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(tmp_path), "NOTED": str(tmp_path / "noted")}
        return {**base, **SMALL, **variables}

    return environment


@pytest.fixture
def noted(platform):
    """The platform's options and the command in the container, of a script that only asks the platform."""

    def run(script, *arguments, **variables):
        environment = platform(**variables)
        done = subprocess.run([DEPLOY / script, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        words = json.loads(pathlib.Path(environment["NOTED"]).read_text())
        at = words.index("--")
        return words[:at], words[at + 1 :]

    return run


def value(options, flag):
    return options[options.index(flag) + 1]


def requests(path, prompts):
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}}
        for n, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["response"]["status_code"] == 200 for line in lines), lines
    return [line["custom_id"] for line in lines]


@pytest.mark.parametrize("script", ["ovh/ai-deploy.sh", "ovh/ai-training.sh"])
def test_without_arguments_the_usage_is_told(script, platform):
    done = subprocess.run([DEPLOY / script], capture_output=True, text=True, env=platform())
    assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_ai_deploy_serves_what_the_platform_asks_for(noted):
    """The command that the platform is given, run: /generate, a key beside the platform's, the metric it scales by."""
    extra = ["--served-model-name", "tiny", "--max-model-len", "128"]
    options, command = noted("ovh/ai-deploy.sh", "registry/octavo:1", str(TINY), *extra, API_KEY="k", HF_TOKEN="t")
    assert options[:3] == ["ovhai", "app", "run"] and options[-1] == "registry/octavo:1"
    assert value(options, "--label") == "name=octavo" and value(options, "--cpu") == "8"
    port = value(options, "--default-http-port")
    assert value(command, "--port") == port == "8080" and value(command, "--host") == "0.0.0.0"
    assert "VLLM_API_KEY=k" in options and "HF_TOKEN=t" in options

    own = str(free_port())
    command = [own if word == port else word for word in command] + ["--shutdown-lag", "0"]
    with running([OCTAVO, *command], own, env={**SMALL, "VLLM_API_KEY": "k"}):
        url = f"http://127.0.0.1:{own}"
        body = {"prompt": "Once", "max_tokens": 4, "n": 2, "temperature": 1, "stream": False}
        platforms = {"Authorization": "Bearer token-of-the-platform"}
        assert ask(f"{url}/generate", body, platforms)[0] == 401
        status, answer = ask(f"{url}/generate", body, {**platforms, "X-API-Key": "k"})
        assert status == 200, answer
        texts = json.loads(answer)["text"]
        assert len(texts) == 2 and all(text.startswith("Once") for text in texts)

        scaled = value(options, "--auto-custom-api-url").replace("<SELF>", "127.0.0.1").replace(port, own)
        status, exposition = ask(scaled)
        metric = value(options, "--auto-custom-value-location")
        series = [line for line in exposition.splitlines() if re.match(rf"{metric}[{{ ]", line)]
        assert status == 200 and len(series) == 1 and series[0].endswith(" 0"), series
        assert ask(url + value(options, "--probe-path"))[0] == 200


def test_ai_training_answers_a_file(noted, tmp_path):
    options, command = noted("ovh/ai-training.sh", "registry/octavo:1", str(TINY), "batch@GRA")
    assert options[:3] == ["ovhai", "job", "run"] and value(options, "--volume") == "batch@GRA:/workspace/batch:rw"
    requests(tmp_path / "requests.jsonl", ["a", "b", "c"])
    command = [word.replace("/workspace/batch", str(tmp_path)) for word in command]
    command += ["--served-model-name", "tiny"]
    done = subprocess.run([OCTAVO, *command], capture_output=True, text=True, env=SMALL, timeout=60)
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "answers.jsonl") == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("script", "arguments"), [("ovh/ai-deploy.sh", []), ("ovh/ai-training.sh", ["batch@GRA"])], ids=["deploy", "training"]
)
def test_gpus_are_asked_for_and_missed_where_there_are_none(noted, script, arguments, tmp_path):
    """What the pages say of GPUs."""
    options, command = noted(script, "i", str(TINY), *arguments, GPUS="1")
    assert value(options, "--gpu") == "1" and "--cpu" not in options
    assert value(command, "--device") == "cuda"
    requests(tmp_path / "requests.jsonl", ["a"])
    command = [word.replace("/workspace/batch", str(tmp_path)) for word in command] + (["--port", "0"] if not arguments else [])
    refused = subprocess.run([OCTAVO, *command], capture_output=True, text=True, env=SMALL, timeout=60)
    assert refused.returncode == 1 and "--device cuda: there is no NVIDIA driver" in refused.stderr, refused.stderr


@pytest.fixture
def cluster(platform, tmp_path):
    """What Slurm sets, and an image that is there."""
    image = tmp_path / "octavo.sqsh"
    image.touch()
    return platform(IMAGE=str(image), MODEL="/models/llama", MODELS=str(TINY.parent), SLURM_JOB_ID="4711",
                    SLURM_CPUS_PER_TASK="1")


def test_slurm_serves_and_its_signal_reaches_the_server(cluster, tmp_path):
    port = str(free_port())
    environment = {**cluster, "PORT": port, "SLURMD_NODENAME": "node7", "FLAGS": "--served-model-name tiny"}
    # A job's scripts run where it was submitted; running() ends it as Slurm does, with a SIGTERM to the script.
    with running([DEPLOY / "slurm" / "serve.sbatch"], port, env=environment, cwd=tmp_path):
        assert (tmp_path / "octavo-4711.url").read_text() == f"http://node7:{port}\n"
        status, answer = ask(f"http://127.0.0.1:{port}/v1/models")
        assert status == 200 and json.loads(answer)["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("script", ["serve.sbatch", "batch.sbatch"])
@pytest.mark.parametrize("ids", ["2", "0,3"])
def test_slurm_passes_the_gpus_of_the_job(cluster, tmp_path, script, ids):
    """The server then insists on a GPU, which is not here."""
    requests(tmp_path / "requests-0.jsonl", ["a"])
    environment = {**cluster, "BATCH": str(tmp_path), "SLURM_JOB_GPUS": ids, "PORT": str(free_port())}
    done = subprocess.run([DEPLOY / "slurm" / script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert f"NVIDIA_VISIBLE_DEVICES={ids}\n" in (tmp_path / "environment").read_text()
    assert done.returncode == 1 and "--device cuda: there is no NVIDIA driver" in done.stderr, done.stderr


def test_slurm_hides_gpus_that_the_job_has_not(cluster, tmp_path):
    environment = {**cluster, "BATCH": str(tmp_path), "FLAGS": "--served-model-name tiny"}
    requests(tmp_path / "requests-0.jsonl", ["a"])
    done = subprocess.run([DEPLOY / "slurm" / "batch.sbatch"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA_VISIBLE_DEVICES=void\n" in (tmp_path / "environment").read_text()


def test_slurm_answers_the_file_of_each_task(cluster, tmp_path):
    requests(tmp_path / "requests-3.jsonl", ["a", "b"])
    environment = {**cluster, "BATCH": str(tmp_path), "SLURM_ARRAY_TASK_ID": "3", "FLAGS": "--served-model-name tiny"}

    def submit(**variables):
        command = [DEPLOY / "slurm" / "batch.sbatch"]
        return subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, timeout=60)

    done = submit()
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "answers-3.jsonl") == ["r0", "r1"]
    # Queued again after its end, as after any interruption: nothing is computed twice.
    assert "is already complete" in submit().stderr
    assert "the folder of the requests" in submit(BATCH="").stderr


def test_slurm_gives_the_server_time_to_finish():
    text = (DEPLOY / "slurm" / "serve.sbatch").read_text()
    seconds = int(re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.M)[1])
    assert seconds >= float(re.search(r"--shutdown-timeout (\d+)", text)[1]) + 10
