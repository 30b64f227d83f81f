"""What every test here shares: the binary and the model."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from places import OCTAVO, TINY  # noqa: E402


@pytest.fixture(scope="session")
def binary():
    """The server's binary, built."""
    assert OCTAVO.is_file(), f"{OCTAVO} is missing: cargo build, or set OCTAVO_BIN"
    return OCTAVO


@pytest.fixture(scope="session")
def model(binary, tmp_path_factory):
    """The smallest checkpoint, with room for streams that last seconds: it makes thousands of tokens in each."""
    folder = tmp_path_factory.mktemp("model")
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    return folder
