"""Octavo, an OpenAI-compatible LLM inference server. `python -m octavo` runs the command that this package installs."""

from octavo.binary import find_binary

__all__ = ["find_binary"]
