"""What README and the other pages tell a reader to type exists, and the cheap part of it works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_ebft.cli.main import COMMANDS
from openrlhf_ebft.config.keys import find_field
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.config.sections import EBFTConfig
from tests.docs.commands import ROOT, own_command, problems, shell_commands
from tests.rad.conftest import configs, make_lm, make_tokenizer, save_classifier

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
SECTIONS = "|".join(sorted({*EBFTConfig.model_fields, "training"} - {"name", "seed"}))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shell_command_exists(page):
    found = [f"{' '.join(words)}: {problem}" for words in shell_commands(page) for problem in problems(words)]
    assert not found


def test_checker_finds_what_is_wrong():
    assert problems(["make", "quickstrat"]) == ["no make target quickstrat"]
    assert problems(["openrlhf-ebft", "trian", "x.yaml"]) == ["no subcommand ['trian']"]
    assert problems(["openrlhf-ebft", "train", "x.yaml", "--policy.max_step=3"]) == [
        "train has no flag --policy.max_step"
    ]
    assert problems(["python", "scripts/nothing.py"]) == ["no file scripts/nothing.py"]


def test_readme_names_every_subcommand_and_the_two_commands():
    named = {own[0] for words in re.findall(r"`(openrlhf-ebft [^`]+)`", text_of(README)) if (own := words.split()[1:])}
    assert named == set(COMMANDS)
    assert [words for words in shell_commands(README) if words[0] == "make"][:2] == [
        ["make", "quickstart"],
        ["make", "test"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_configuration_keys_in_running_text_exist(page):
    keys = re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)(?:: [^`]*)?`", text_of(page))
    models = (EBFTConfig, RewardConfig)
    missing = {key for key in keys if not any(find_field(model, tuple(key.split("."))) for model in models)}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    local = [link.partition("#")[0] for link in links if not link.startswith(("http", "#"))]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


def test_index_lists_every_page_of_docs():
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert names == set(re.findall(r"\]\(([a-z_-]+\.md)\)", text_of(ROOT / "docs" / "README.md")))


def test_architecture_page_names_files_that_exist():
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text_of(ROOT / "docs" / "architecture.md"))
    assert len(named) > 5
    assert [name for name in named if not ((ROOT / "openrlhf_ebft" / name).exists() or (ROOT / name).exists())] == []


def test_train_commands_of_the_readme_pass_the_configuration_check(tmp_path):
    (yaml_text,) = re.findall(r"```yaml\n(.*?)```", text_of(README), flags=re.DOTALL)
    mine = tmp_path / "my-run.yaml"
    mine.write_text(yaml_text)
    commands = [own for words in shell_commands(README) if (own := own_command(words)) and own[0] == "train"]
    started = [own for own in commands if "--resume" not in own]
    assert len(started) > 3
    for arguments in [*started, ["train", "examples/quickstart.yaml"]]:
        named = [str(mine) if Path(word).name == mine.name else word for word in arguments]
        done = openrlhf_ebft(*dict.fromkeys([*named, "--print-config"]))
        assert done.returncode == 0, done.stderr


def test_python_of_the_readme_runs(tmp_path):
    model, tokenizer = make_lm(configs()["llama"]), make_tokenizer()
    tokenizer.padding_side = "left"
    model.generation_config.pad_token_id = 1
    reward_folder = save_classifier(tmp_path / "reward", configs()["gpt2"])
    names = {"model": model, "tokenizer": tokenizer, "prompts": ["w3 w4", "w5 w6 w7"], "reward_folder": reward_folder}
    blocks = re.findall(r"```python\n(.*?)```", text_of(README), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["advantages"].shape == (4,) and torch.isfinite(names["advantages"]).all()
    assert names["output"].shape == (2, 3 + 16)


def openrlhf_ebft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openrlhf_ebft.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
