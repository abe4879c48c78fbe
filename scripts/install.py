#!/usr/bin/env python3
"""Makes .venv in this clone with the stack that fits the machine, and checks that the stack imports.

Needs nothing but Python's standard library. Safe to repeat: a stamp in the environment says what it was made from,
and a second call with the same setup.py, installer, Python and stack does nothing.

vllm's CPU build wants exactly the CPU build of torch, which the general package index does not carry. So torch goes
first and alone: from what pip finds (a mirror or a folder of wheels may have it), else from PyTorch's own index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "openrlhf-ebft-install.json"
SUPPORTED = ((3, 12), (3, 11))
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# They come along as CUDA builds that do not load beside a CPU torch, and transformers then fails on importing them.
# Text models need none of them.
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
CHECKED_IMPORTS = ("torch", "transformers", "vllm", "ray", "deepspeed", "datasets", "gguf", "openrlhf_ebft.config")


class InstallError(Exception):
    """An installation that cannot go on; the message says what to change."""


def main(argv: list[str] | None = None) -> int:
    """Installs into the environment folder, or says that it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="environment folder (default: .venv here)")
    parser.add_argument("--stack", choices=("auto", "cpu", "gpu"), default="auto", help="auto: gpu if nvidia-smi works")
    parser.add_argument(
        "--no-dev", action="store_true", help="leave out the tools of development; copy the package, do not link to it"
    )
    parser.add_argument("--force", action="store_true", help="install again even if the stamp is up to date")
    arguments = parser.parse_args(argv)
    stack = detect_stack() if arguments.stack == "auto" else arguments.stack
    try:
        interpreter, version = find_interpreter()
        wanted = describe(stack, version, no_dev=arguments.no_dev)
        if not arguments.force and read_stamp(arguments.venv) == wanted:
            print(f"install: {arguments.venv} is up to date ({stack} stack, Python {version})")
            return 0
        check_machine()
        python = make_environment(arguments.venv, interpreter, version)
        install_torch(python, stack)
        say("installing the rest of the stack (about 4 GB, some minutes)")
        pip(python, "install", *package_arguments(stack, arguments.no_dev))
        remove_broken_media_packages(python)
        check_environment(python, stack)
    except InstallError as error:
        print(f"install: error: {error}", file=sys.stderr)
        return 1
    stamp_path(arguments.venv).write_text(json.dumps(wanted, indent=1))
    say(f"done: {stack} stack in {arguments.venv}")
    return 0


def detect_stack() -> str:
    """Returns gpu when the NVIDIA driver lists a device, else cpu."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "gpu" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def find_interpreter() -> tuple[str, str]:
    """Returns (path, "3.11" or "3.12") of a supported Python: the running one, else the newest on PATH."""
    # Inside an environment, perhaps the very one to be remade, the interpreter it was made from is meant.
    running = getattr(sys, "_base_executable", sys.executable)
    for candidate in (running, *(f"python{major}.{minor}" for major, minor in SUPPORTED)):
        version = python_version(candidate)
        if version in SUPPORTED:
            return candidate, f"{version[0]}.{version[1]}"
    names = " or ".join(f"{major}.{minor}" for major, minor in reversed(SUPPORTED))
    raise InstallError(f"needs Python {names}; this is {sys.version.split()[0]} and PATH has none of them")


def python_version(candidate: str) -> tuple[int, ...] | None:
    """Returns (major, minor) of an interpreter, None when it does not run."""
    command = [candidate, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return tuple(int(part) for part in done.stdout.split()) if done.returncode == 0 else None


def describe(stack: str, version: str, *, no_dev: bool = False) -> dict[str, str]:
    """Returns what an environment is made from; it is up to date while this does not change."""
    files = (ROOT / "setup.py", Path(__file__).resolve())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    made = {"stack": stack, "python": version, "root": str(ROOT), "sources": digest}
    return made | {"tools": "none"} if no_dev else made


def stamp_path(venv: Path) -> Path:
    """Returns where the stamp of an environment lies."""
    return venv / STAMP


def read_stamp(venv: Path) -> dict[str, str] | None:
    """Returns the stamp of a finished installation, None when there is none or its Python is gone."""
    path = stamp_path(venv)
    if not path.is_file() or not environment_python(venv).exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def environment_python(venv: Path) -> Path:
    """Returns the interpreter of an environment."""
    return venv / "bin" / "python"


def check_machine() -> None:
    """DeepSpeed compiles a small C++ extension on first use: say so now, not in the middle of a run."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise InstallError("no C++ compiler on PATH: install one (Debian and Ubuntu: apt-get install g++)")


def make_environment(venv: Path, interpreter: str, version: str) -> str:
    """Returns the interpreter of the environment, made new when it is missing or of another Python."""
    python = environment_python(venv)
    found = python_version(str(python)) if python.exists() else None
    if found is None or f"{found[0]}.{found[1]}" != version:
        if venv.exists() and not (venv / "pyvenv.cfg").exists():
            raise InstallError(f"{venv} exists and is no virtual environment: move it away")
        say(f"making {venv} with Python {version}")
        done = subprocess.run([interpreter, "-m", "venv", "--clear", str(venv)], check=False)
        if done.returncode:
            raise InstallError(f"{interpreter} -m venv failed (Debian and Ubuntu: apt-get install python3-venv)")
    stamp_path(venv).unlink(missing_ok=True)
    return str(python)


def install_torch(python: str, stack: str) -> None:
    """Installs the build of torch that the stack needs."""
    say(f"installing torch {TORCH} ({stack} build)")
    if stack == "gpu":
        # Triple equals: a local build such as +cpu would satisfy == and be preferred.
        pip(python, "install", f"torch==={TORCH}")
        return
    requirement = f"torch=={TORCH}" if sys.platform == "darwin" else f"torch=={TORCH}+cpu"
    if pip(python, "install", requirement, required=False):
        return
    say(f"the package index has no {requirement}; trying {CPU_INDEX}")
    pip(python, "install", requirement, "--extra-index-url", CPU_INDEX)


def package_arguments(stack: str, no_dev: bool) -> list[str]:
    """Returns what pip installs of this clone: the package with its stack, linked and with tools unless `no_dev`."""
    return [f"{ROOT}[{stack}]"] if no_dev else ["--editable", f"{ROOT}[{stack},dev]"]


def remove_broken_media_packages(python: str) -> None:
    """Uninstalls the media companions of torch that are installed and do not import."""
    for name in MEDIA_PACKAGES:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        installed = subprocess.run([python, "-c", code], check=False).returncode == 0
        if installed and import_error(python, name) is not None:
            say(f"removing {name}: it does not load beside this torch, and text models do not need it")
            pip(python, "uninstall", "--yes", name)


def check_environment(python: str, stack: str) -> None:
    """Imports every part of the stack and compares torch's build with the stack."""
    say("checking that the stack imports")
    failures = [(name, error) for name in CHECKED_IMPORTS if (error := import_error(python, name)) is not None]
    if failures:
        details = "\n".join(f"  {name}: {error}" for name, error in failures)
        raise InstallError(f"installed, but these do not import:\n{details}")
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    build = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if (build[1] == "None") != (stack == "cpu"):
        raise InstallError(
            f"the {stack} stack got torch {build[0]} (CUDA {build[1]}): remove the environment, try again"
        )
    say(f"torch {build[0]} (CUDA {build[1]})")


def import_error(python: str, name: str) -> str | None:
    """Returns the last line of the traceback when `import name` fails, else None."""
    done = subprocess.run([python, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def pip(python: str, *arguments: str, required: bool = True) -> bool:
    """Runs pip in the environment; returns whether it succeeded. Raises InstallError when it must and did not."""
    command = [python, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, "PIP_PROGRESS_BAR": "off"}
    # An attempt that may fail keeps its errors to itself; the next attempt shows its own.
    errors = None if required else subprocess.DEVNULL
    done = subprocess.run([*command, "--quiet"], env=environment, stderr=errors, check=False)
    if done.returncode and required:
        raise InstallError(f"pip {' '.join(arguments)} failed; its own message is above")
    return done.returncode == 0


def say(text: str) -> None:
    """Prints one line of progress at once."""
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
