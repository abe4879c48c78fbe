"""The console script: help without torch, clear errors with exit code 2, no traceback."""

import subprocess
import sys
import time

import pytest

from openrlhf_ebft import __version__
from openrlhf_ebft.cli.config_arguments import split_overrides
from openrlhf_ebft.cli.main import COMMANDS, main
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import UserError

CONFIG = "name: run\nmodel:\n  path: some/model\ndata:\n  path: rows.jsonl\n"
QUICK = ("train", "evaluate", "generate", "prepare-model", "prepare-data")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"openrlhf-ebft {__version__}\n"


def test_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in QUICK)])
def test_help_is_quick_and_imports_no_torch(arguments):
    script = (
        "import sys\nfrom openrlhf_ebft.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert not {'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert seconds < 5.0  # far above the usual 0.15 s: other tests may hold the cores, but torch takes longer


def test_train_module_runs_by_itself(config_file):
    command = [sys.executable, "-m", "openrlhf_ebft.cli.train", config_file, "--print-config", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "seed: 7\n" in done.stdout


def test_train_help_lists_flags_with_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert "--rollout.temperature  sampling temperature; 0 is greedy (default 0.6)" in out
    assert "--model.path" in out


def test_print_config_can_be_loaded_again(config_file, tmp_path, capsys):
    assert main(["train", config_file, "--print-config", "--policy.max_steps", "3"]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert main(["train", "--print-config", str(again)]) == 0
    assert capsys.readouterr().out == printed


def test_configuration_errors_are_one_message(config_file, capsys):
    assert main(["train", config_file, "--rollout.temprature", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "did you mean --rollout.temperature?" in captured.err
    assert "Traceback" not in captured.err


def test_overrides_may_stand_anywhere():
    argv = ["--seed", "3", "run.yaml", "--print-config", "--a.b=x", "--model", "m", "--c.d", "-1", "--e.f"]
    own, overrides = split_overrides(argv, {"--print-config": False, "--model": True})
    assert own == ["run.yaml", "--print-config", "--model", "m"]
    assert overrides == ["--seed", "3", "--a.b=x", "--c.d", "-1", "--e.f"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("row 3 is empty"), 2, "error: row 3 is empty\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.jsonl"),
            2,
            "error: x.jsonl: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_that_lose_their_traceback(capsys, error, code, message):
    def fail(argv):
        raise error

    assert run_command(fail, []) == code
    assert capsys.readouterr().err == message


def test_faults_of_the_program_keep_their_traceback():
    def fail(argv):
        raise ValueError("shape (3,) does not match (4,)")

    with pytest.raises(ValueError, match="shape"):
        run_command(fail, [])
