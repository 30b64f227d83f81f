"""Replaces this process with the `octavo` command."""

import os
import sys

from octavo.binary import find_binary


def main():
    try:
        binary = find_binary()
    except FileNotFoundError as error:
        sys.exit(f"octavo: {error}")
    os.execv(binary, [binary, *sys.argv[1:]])


if __name__ == "__main__":
    main()
