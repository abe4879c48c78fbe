"""The installer's decisions: which Python, which stack, which torch, when nothing is to be done."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def install():
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    """A PATH of its own, on which tests put small shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return add


def test_stack_is_cpu_without_driver(install, fake_tools):
    assert install.detect_stack() == "cpu"


@pytest.mark.parametrize(
    ("script", "stack"),
    [("echo 'GPU 0: X'", "gpu"), ("echo failed; exit 9", "cpu"), ("echo 'No devices found.'", "cpu")],
)
def test_stack_follows_the_driver(install, fake_tools, script, stack):
    fake_tools("nvidia-smi", script)
    assert install.detect_stack() == stack


def test_interpreter_is_a_supported_one(install):
    path, version = install.find_interpreter()
    assert install.python_version(path) == tuple(int(part) for part in version.split("."))
    assert Path(path).resolve() == Path(sys._base_executable).resolve()


def test_unsupported_python_is_an_error(install, fake_tools, monkeypatch):
    monkeypatch.setattr(install, "SUPPORTED", ((3, 99),))
    with pytest.raises(install.InstallError, match=r"needs Python 3\.99"):
        install.find_interpreter()


def test_other_python_on_path_is_found(install, fake_tools, monkeypatch):
    monkeypatch.setattr(install, "SUPPORTED", ((3, 99),))
    fake_tools("python3.99", "echo 3 99")
    assert install.find_interpreter() == ("python3.99", "3.99")


def test_missing_compiler_is_named(install, fake_tools):
    with pytest.raises(install.InstallError, match=r"no C\+\+ compiler"):
        install.check_machine()
    fake_tools("g++", "exit 0")
    install.check_machine()


class Pip:
    """Stands for the network: records what would be installed, and fails where told."""

    def __init__(self, missing=()):
        self.calls = []
        self.missing = missing

    def __call__(self, python, *arguments, required=True):
        self.calls.append(arguments)
        return not (set(arguments) & set(self.missing) and not required)


def test_torch_comes_from_what_pip_finds(install, monkeypatch):
    monkeypatch.setattr(install, "pip", found := Pip())
    install.install_torch("python", "cpu")
    assert found.calls == [("install", "torch==2.13.0+cpu")]


def test_torch_comes_from_its_own_index_otherwise(install, monkeypatch):
    monkeypatch.setattr(install, "pip", found := Pip(missing=["torch==2.13.0+cpu"]))
    install.install_torch("python", "cpu")
    assert found.calls[1] == ("install", "torch==2.13.0+cpu", "--extra-index-url", install.CPU_INDEX)


def test_gpu_torch_is_never_a_local_build(install, monkeypatch):
    monkeypatch.setattr(install, "pip", found := Pip())
    install.install_torch("python", "gpu")
    assert found.calls == [("install", "torch===2.13.0")]


def test_broken_packages_are_named_with_their_error(install):
    assert install.import_error(sys.executable, "json") is None
    assert install.import_error(sys.executable, "no_such_module").startswith("ModuleNotFoundError")


def test_only_installed_and_broken_media_packages_are_removed(install, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator does not exist')")
    (tmp_path / "torchaudio.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install, "MEDIA_PACKAGES", ("torchvision", "torchaudio", "no_such_package"))
    monkeypatch.setattr(install, "pip", found := Pip())
    install.remove_broken_media_packages(sys.executable)
    assert found.calls == [("uninstall", "--yes", "torchvision")]


def test_folder_that_is_no_environment_is_left_alone(install, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(install.InstallError, match="is no virtual environment"):
        install.make_environment(tmp_path, sys.executable, "3.11")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def finished_environment(install, venv):
    python = install.environment_python(venv)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    version = "{}.{}".format(*sys.version_info[:2])
    install.stamp_path(venv).write_text(json.dumps(install.describe("cpu", version)))


def test_up_to_date_environment_is_left_alone(install, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "pip", found := Pip())
    finished_environment(install, tmp_path / "env")
    assert install.main(["--venv", str(tmp_path / "env"), "--stack", "cpu"]) == 0
    assert found.calls == []
    assert "is up to date (cpu stack" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"stack": "gpu"}, {"sources": "other"}, {"python": "3.10"}, None])
def test_stamp_of_other_things_does_not_count(install, tmp_path, change):
    finished_environment(install, tmp_path)
    wanted = install.describe("cpu", "{}.{}".format(*sys.version_info[:2]))
    assert install.read_stamp(tmp_path) == wanted
    text = "torn" if change is None else json.dumps({**wanted, **change})
    install.stamp_path(tmp_path).write_text(text)
    assert install.read_stamp(tmp_path) != wanted
