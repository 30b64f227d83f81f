"""Finds the installed `octavo` binary."""

import os
import sysconfig


def find_binary():
    """Path of the `octavo` binary that was installed with this package.

    Raises FileNotFoundError if it is in none of the folders that pip installs scripts to."""
    package = os.path.dirname(os.path.abspath(__file__))
    folders = [
        sysconfig.get_path("scripts"),
        # pip install --user
        sysconfig.get_path("scripts", scheme=f"{os.name}_user"),
        # pip install --target FOLDER
        os.path.join(os.path.dirname(package), "bin"),
        # pip install --prefix FOLDER: FOLDER/lib/pythonX.Y/site-packages/octavo
        os.path.join(package, *[os.pardir] * 4, "bin"),
    ]
    for folder in folders:
        path = os.path.join(os.path.normpath(folder), "octavo")
        if os.path.isfile(path):
            return path
    raise FileNotFoundError("the octavo binary is in none of these folders: " + ", ".join(map(os.path.normpath, folders)))
