"""A file imports only from floors below its own, and the light parts load without torch."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "openrlhf_ebft"
PACKAGE = "openrlhf_ebft"
STACK = {"ray", "vllm", "deepspeed"}

# Top-level modules, and folders of this package, that a folder must not import at any place.
FORBIDDEN_OUTSIDE = {
    "config": {"torch", "numpy", "transformers", "datasets", "peft", "safetensors", "gguf"} | STACK,
    "models": STACK,
    "data": STACK,
    "rad": {"ray", "deepspeed"},
    "evaluation": STACK,
    "distributed": {"ray"},
    "trainer": {"vllm", "deepspeed"},
}
FLOORS = {
    "config": 0,
    "core": 1,
    "models": 2,
    "data": 2,
    "rad": 2,
    "evaluation": 2,
    "distributed": 3,
    "rollouts": 3,
    "serving": 3,
    "actors": 4,
    "trainer": 5,
    "cli": 6,
}
FORBIDDEN_INSIDE = {"data": {"models"}}
VLLM_ALLOWED = {"rad/vllm_processor.py"}  # in rad, the only file that may know vllm
FILES = sorted(path for path in ROOT.rglob("*.py") if len(path.relative_to(ROOT).parts) > 1)


def imported_modules(path):
    """Absolute dotted names of everything that a file imports, at whatever depth of its code."""
    package = (PACKAGE, *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module or "")).strip(".")
            yield module
            if module == PACKAGE:
                yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)


def own_folders(path):
    names = (name.split(".") for name in imported_modules(path))
    return {name[1] for name in names if name[0] == PACKAGE and len(name) > 1 and name[1] in FLOORS}


def test_every_folder_has_a_floor():
    folders = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert folders <= set(FLOORS), f"without a floor: {sorted(folders - set(FLOORS))}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_imports_only_from_below(path):
    relative = path.relative_to(ROOT)
    folder = relative.parts[0]
    above = {other for other in own_folders(path) if other != folder and FLOORS[other] > FLOORS[folder]}
    above |= own_folders(path) & FORBIDDEN_INSIDE.get(folder, set())
    assert not above, f"{relative} (floor {FLOORS[folder]}) imports from {sorted(above)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_leaves_forbidden_packages_alone(path):
    relative = path.relative_to(ROOT)
    folder = relative.parts[0]
    tops = {name.split(".")[0] for name in imported_modules(path)}
    forbidden = set(FORBIDDEN_OUTSIDE.get(folder, set()))
    if folder == "rad" and str(relative) not in VLLM_ALLOWED:
        forbidden.add("vllm")
    if folder == "core":
        allowed = {"torch", PACKAGE} | set(sys.stdlib_module_names)
        assert tops <= allowed, f"{relative} imports {sorted(tops - allowed)}"
    if folder == "cli":
        at_parse_time = top_level_imports(path)
        assert not at_parse_time & {"torch", "transformers", "datasets", "numpy", *STACK}
    assert not tops & forbidden, f"{relative} imports {sorted(tops & forbidden)}"


def top_level_imports(path):
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.config", f"{PACKAGE}.cli.main", f"{PACKAGE}.cli.train"])
def test_light_modules_load_without_torch(module):
    heavy = ["torch", "numpy", "transformers", "datasets", *sorted(STACK)]
    script = f"import sys, {module}\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_import_takes_under_half_a_second():
    times = []
    for _ in range(3):  # the best of three: other work may hold the cores
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {PACKAGE}"], check=True, timeout=60)
        times.append(time.monotonic() - start)
    assert min(times) < 0.5
