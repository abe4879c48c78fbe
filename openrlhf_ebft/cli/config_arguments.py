"""Arguments of the commands that take a configuration file and `--section.key value` flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from openrlhf_ebft.config.keys import iterate_fields


def split_overrides(argv: Sequence[str], own_flags: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Returns (the command's own arguments, configuration flags with their values).

    `own_flags` maps each flag of the command to whether a value follows it; every other `--name` belongs to the
    configuration and takes the next word as its value, unless that is a flag too.
    """
    own: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        is_own = not word.startswith("--") or word.partition("=")[0] in own_flags
        target = own if is_own else overrides
        target.append(word)
        takes_value = own_flags.get(word, False) if is_own else "=" not in word
        if takes_value and position < len(argv) and not argv[position].startswith("--"):
            target.append(argv[position])
            position += 1
    return own, overrides


def list_keys(model: type[BaseModel]) -> str:
    """Returns every configuration flag with its default and meaning, one a line."""
    lines = ["configuration flags (spelled as in the file):"]
    for path, field in iterate_fields(model):
        default = "required" if field.is_required() else f"default {_plain(field.get_default())}"
        lines.append(f"  --{'.'.join(path)}  {field.description} ({default})")
    return "\n".join(lines)


def config_parser(
    prog: str, description: str, model: type[BaseModel], *, config_required: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser with the CONFIG argument, whose help ends with the list of configuration flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} CONFIG [options] [--section.key value ...]",
        description=description,
        epilog=list_keys(model),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    nargs = None if config_required else "?"
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, help="YAML file of the run")
    return parser


def _plain(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
