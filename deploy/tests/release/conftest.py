"""The packages under test: those of a folder, or those that build.sh makes."""

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from places import OCTAVO, ROOT  # noqa: E402

# Packages that are there already.
GIVEN = os.environ.get("OCTAVO_PACKAGES")
# Compiles what is released. Otherwise the binary of the tests is packaged, by the same script.
RELEASE = os.environ.get("OCTAVO_RELEASE") == "1"


@pytest.fixture(scope="session")
def released():
    """Whether the packages are such as are released."""
    return GIVEN is not None or RELEASE


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """The folder of the packages."""
    if GIVEN:
        return (ROOT / GIVEN).resolve()
    folder = tmp_path_factory.mktemp("packages")
    command = [ROOT / "deploy" / "release" / "build.sh", "--output", folder]
    command += [] if RELEASE else ["--binary", OCTAVO]
    built = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert built.returncode == 0, built.stdout + built.stderr
    return folder
