"""`octavo chat`, `run`, `list` and `ps` as a person at a terminal uses them: through a pseudo-terminal."""

import contextlib
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import termios
import time

import pytest

from conftest import OCTAVO, ROOT

TINY = ROOT / "models" / "testdata" / "llama"
UP, CTRL_A, CTRL_C, CTRL_D = "\x1b[A", "\x01", "\x03", "\x04"
# Answers of the tiny model mean nothing; greedy ones at least stay the same.
ANSWER = ["--temperature", "0", "--max-tokens", "4"]


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, *arguments, home):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "xterm", "OCTAVO_CPU_THREADS": "1"}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execve(OCTAVO, [str(OCTAVO), *map(str, arguments)], environment)
        termios.tcsetwinsize(self.terminal, (40, 200))
        self.shown = ""

    def type(self, text):
        os.write(self.terminal, text.encode())

    def wait(self, pattern, seconds=60):
        """What was shown up to the end of `pattern`; it is then forgotten."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            try:
                data = os.read(self.terminal, 65536) if ready else b""
            except OSError:  # The program has closed its side.
                data = b""
            if not data:
                pytest.fail(f"no {pattern!r} in {self.shown!r}")
            # Without what moves the cursor and colours the text.
            self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", data.decode(errors="replace"))
        shown, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return shown

    def prompt(self):
        return self.wait(r">>> $")

    def ends(self):
        """The exit status, once the program has ended by itself."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            # A program that waits for its output to be read does not end.
            if select.select([self.terminal], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    os.read(self.terminal, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = None
                return os.waitstatus_to_exitcode(status)
        pytest.fail("it does not end")

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(*arguments):
        opened.append(Terminal(*arguments, home=tmp_path))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def octavo(*arguments, home, **options):
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "OCTAVO_CPU_THREADS": "1"}
    command = [OCTAVO, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


def test_lines_are_edited_and_remembered(terminal, tiny_url, tmp_path):
    chat = terminal("chat", "--url", tiny_url, *ANSWER)
    assert "tiny (/help lists the commands" in chat.prompt()
    # The cursor goes to the start of the line, where a word is inserted.
    chat.type("world" + CTRL_A + "hello \r")
    assert "hello world" in chat.prompt()
    chat.type("/set\r")
    shown = chat.prompt()
    # top_p is in the model's generation_config.json.
    rows = ["temperature +0.0 +set here", "top_p +0.95 +the model's default", "min_p +- +the server's default"]
    assert all(re.search(row, shown) for row in rows), shown
    chat.type("/he\t\r")
    assert "/save FILE" in chat.prompt()
    chat.type(CTRL_D)
    assert chat.ends() == 0

    history = tmp_path / ".local/state/octavo/history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().splitlines()[1:] == ["hello world", "/set", "/help "]

    again = terminal("chat", "--url", tiny_url, *ANSWER)
    again.prompt()
    again.type(UP + UP + UP + "\r")
    assert "hello world" in again.prompt()
    again.type("/bye\r")
    assert again.ends() == 0


def test_without_a_history_nothing_is_written(terminal, tiny_url, tmp_path):
    chat = terminal("chat", "--url", tiny_url, "--no-history", *ANSWER)
    chat.prompt()
    chat.type("hello\r")
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.ends() == 0
    assert not list(tmp_path.iterdir())


def test_control_c_stops_the_answer_and_not_the_program(terminal, base_url):
    chat = terminal("chat", "--url", base_url, "--temperature", "0")
    chat.prompt()
    chat.type("Count from 1 to 1000, in words.\r")
    # The beginning of the answer, which is on the line after the question.
    chat.wait(r"words\.\n.*\w{10}", seconds=120)
    chat.type(CTRL_C)
    assert "[stopped]" in chat.wait(r">>> $", seconds=30)
    chat.type("half a line" + CTRL_C)
    assert "Ctrl-D or /bye exits" in chat.wait(r"exits\)\s+>>> $")
    chat.type("/system Be brief.\r")
    chat.prompt()
    chat.type("/system\r")
    assert "Be brief." in chat.prompt()
    chat.type(CTRL_D)
    assert chat.ends() == 0


def test_several_lines_are_one_message(terminal, tiny_url, tmp_path):
    chat = terminal("chat", "--url", tiny_url, *ANSWER)
    chat.prompt()
    chat.type('"""one\r')
    chat.wait(r"\.\.\. $")
    chat.type('two"""\r')
    chat.prompt()
    chat.type("/save ~/c.json\r")
    assert "saved 2 messages" in chat.prompt()
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["messages"][0] == {"role": "user", "content": "one\ntwo"}
    chat.type("/clear\r")
    chat.prompt()
    chat.type("/load ~/c.json\r")
    assert "loaded 2 messages" in chat.prompt()
    chat.type(CTRL_D)
    assert chat.ends() == 0


def test_run_loads_a_model_for_a_conversation(terminal):
    run = terminal("run", TINY, *ANSWER)
    run.prompt()
    run.type("hello\r")
    run.prompt()
    run.type(CTRL_D)
    assert run.ends() == 0


def test_a_prompt_and_a_pipe_need_no_terminal(tiny_url, tmp_path):
    once = octavo("run", TINY, *ANSWER, "a", "b", home=tmp_path, input="piped\n")
    assert once.returncode == 0, once.stderr
    flags = ["chat", "--url", tiny_url, *ANSWER]
    piped = octavo(*flags, home=tmp_path, input="piped\n\na b")
    assert once.stdout == piped.stdout and once.stdout.strip(), "the pipe's text is in front of the prompt"
    assert octavo(*flags, "-q", "other words", home=tmp_path).stdout.strip()
    assert not list(tmp_path.iterdir()), "no history of what nobody typed"


def test_ps_shows_a_server_and_list_what_is_on_disk(base_url, tmp_path):
    heading, row = octavo("ps", "--url", base_url, home=tmp_path).stdout.splitlines()
    assert heading.split()[:4] == ["MODEL", "CONTEXT", "RUNNING", "WAITING"]
    assert row.split()[:4] == ["default", "1024", "0", "0"] and row.endswith(base_url)
    nobody = octavo("ps", "--url", "http://127.0.0.1:1", home=tmp_path)
    assert nobody.returncode == 1 and "`octavo serve` starts a server" in nobody.stderr, nobody.stderr
    assert nobody.stderr.count("refused") == 1, nobody.stderr

    assert "no models on disk" in octavo("list", home=tmp_path).stderr
    snapshot = tmp_path / ".cache/huggingface/hub/models--org--name/snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    for name, size in [("config.json", 2), ("model.safetensors", 2048), ("other-Q8_0.gguf", 4096)]:
        (snapshot / name).write_bytes(b"x" * size)
    rows = octavo("list", home=tmp_path).stdout.splitlines()[1:]
    assert sorted(row.split()[0] for row in rows) == ["org/name", "org/name:other-Q8_0.gguf"]
    assert all("just now" in row for row in rows), rows


def test_a_hub_out_of_reach_is_told_within_two_seconds(tmp_path):
    def told(endpoint):
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "HF_ENDPOINT": endpoint}
        begun = time.monotonic()
        command = [OCTAVO, "pull", "org/name"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as pull:
            line = pull.stderr.readline()
            seconds = time.monotonic() - begun
            pull.kill()
        return line, seconds

    line, seconds = told("http://127.0.0.1:1")
    assert "could not be reached" in line and seconds < 2, line
    # One that takes the connection and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        line, seconds = told(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "still waiting for http://127.0.0.1" in line and seconds < 2, line
    # One that does not even take the connection: its queue is full.
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        line, seconds = told(f"http://127.0.0.1:{full.getsockname()[1]}")
    assert "still waiting for http://127.0.0.1" in line and seconds < 2, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_scripts(shell, tmp_path):
    script = octavo("completions", shell, home=tmp_path)
    assert script.returncode == 0 and "max-model-len" in script.stdout
    if shell == "bash":
        path = pathlib.Path(tmp_path, "octavo.bash")
        path.write_text(script.stdout)
        ask = f"source {path}; COMP_WORDS=(octavo pu); COMP_CWORD=1; _octavo octavo pu octavo; echo ${{COMPREPLY[*]}}"
        assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True).stdout.split() == ["pull"]


def test_refusals_are_told_once_and_blame_the_right_thing(tmp_path):
    def refused(*arguments):
        ended = octavo(*arguments, home=tmp_path)
        assert ended.returncode != 0
        return ended.stderr.splitlines()[-1]

    serve = ["serve", "--host", "127.0.0.1", "--port", "0"]
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model.safetensors").touch()
    line = refused(*serve, tmp_path)
    assert line.count("the architecture 'mamba' is not supported") == 1, line
    line = refused(*serve, TINY, "--chat-template", "/no/such.jinja")
    assert line.startswith("octavo: --chat-template /no/such.jinja: No such file"), line
    line = refused("pull", "llama3.2")
    assert "did you mean 'llama-3.2-1b-instruct'?" in line, line
