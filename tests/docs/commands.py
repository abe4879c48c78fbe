"""The shell commands of a Markdown page, and what is wrong with one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from openrlhf_ebft.cli.main import COMMANDS
from openrlhf_ebft.config.keys import find_field
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.config.sections import EBFTConfig

ROOT = Path(__file__).parents[2]
CONFIGURED = {"train": EBFTConfig, "doctor": EBFTConfig, "evaluate": EBFTConfig, "train-reward": RewardConfig}


def shell_commands(page: Path) -> list[list[str]]:
    """Words of every command in the page's ```sh blocks; continued lines are joined, comments dropped."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def own_command(words: list[str]) -> list[str] | None:
    """Arguments of `openrlhf-ebft` inside a command, wherever it stands in it; None when it is not called."""
    places = [i for i, word in enumerate(words) if Path(word).name == "openrlhf-ebft"]
    return words[places[0] + 1 :] if places else None


def problems(words: list[str]) -> list[str]:
    """What does not exist of a command: make targets, subcommands, flags, scripts, folders of tests."""
    own = own_command(words)
    found = _problems_of_own(own) if own is not None else []
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
        found += [f"no make target {word}" for word in words[1:] if word not in targets]
    if Path(words[0]).name in ("python", "pytest", "ruff"):
        files = [word for word in words[1:] if re.fullmatch(r"[\w/.-]+\.py|tests/[\w/]+", word)]
        found += [f"no file {file}" for file in files if not (ROOT / file).exists()]
    if words[:3] == ["ray", "job", "submit"]:
        options = words[3 : words.index("--")]
        found += [f"ray job submit has no {flag}" for flag in _flags(options) if flag not in _help("ray", *words[1:3])]
    return found


def _problems_of_own(arguments: list[str]) -> list[str]:
    if not arguments or arguments[0] not in COMMANDS:
        return [f"no subcommand {arguments[:1]}"]
    command = arguments[0]
    model = CONFIGURED.get(command)
    found = []
    for flag in _flags(arguments):
        is_key = model is not None and find_field(model, tuple(flag[2:].split("."))) is not None
        if not is_key and flag not in _help("openrlhf-ebft", command):
            found.append(f"{command} has no flag {flag}")
    return found


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


@cache
def _help(*command: str) -> frozenset[str]:
    """Flags that a command's help names."""
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:], "--help"], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} --help failed: {done.stderr}")
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w.-]*", done.stdout))
