"""`openrlhf-ebft doctor` as a user runs it: exit codes, and no Ray unless a cluster is named."""

import subprocess
import sys
import time

import pytest

from openrlhf_ebft.cli.doctor import main
from openrlhf_ebft.config.errors import UserError
from tests.processes import ROOT
from tests.tiny_models import tiny_llama


@pytest.fixture
def config(tmp_path):
    tiny_llama(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: r\nmodel: {{path: {tmp_path / 'model'}}}\ndata: {{path: d}}\nlogging: {{root: {tmp_path / 'runs'}}}\n"
    )
    return str(path)


def test_it_answers_within_seconds_without_the_heavy_libraries(config):
    script = (
        "import sys\nfrom openrlhf_ebft.cli.doctor import main\n"
        f"code = main([{config!r}])\n"
        "print([name for name in ('ray', 'torch', 'vllm') if name in sys.modules], code)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - start < 10
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 0"
    for word in ("Python", "torch 2.", "CPU cores", "free", "6379 Ray head", "disk:", "no problems found"):
        assert word in done.stdout


def test_a_run_that_does_not_fit_exits_with_1_and_says_why(config, capsys):
    assert main([config, "--cluster", "1x2", "--placement.share_gpus", "never"]) == 1
    shown = capsys.readouterr().out
    assert "1 problem:" in shown and "asked: 1.5 CPU, 3 GPU" in shown and "node 0: 96 CPU, 2 GPU" in shown
    assert main([config, "--cluster", "1x3"]) == 0
    assert "policy trainer 0, rollout engine 0, feature network 0" in capsys.readouterr().out


def test_gpu_memory_can_be_given(config, capsys):
    flags = ["--cluster", "1x1", "--rollout.gpu_memory_utilization", "1.0"]
    assert main([config, *flags, "--gpu-memory", "80"]) == 1
    assert "but a GPU has 80.0 GiB" in capsys.readouterr().out
    assert main([config, *flags]) == 0
    assert "GPU memory unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "two"], "must be NODESxGPUS"),
        (["--cluster", "1x1", "--address", "h:1"], "give one of them"),
        (["--seed", "3"], "name its file first"),
        (["--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments)
