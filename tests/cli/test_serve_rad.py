"""`openrlhf-ebft serve-rad`: configuration, flags and refusals before anything heavy is loaded."""

from pathlib import Path

import pytest
import yaml

from openrlhf_ebft.cli.main import main
from openrlhf_ebft.config.serving import load_serving_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serve_rad_sentiment.yaml"


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "serve.yaml"

    def write(**sections):
        content = {"model": {"path": "folder/lm"}, "reward_models": {"good": {"path": "folder/good"}}} | sections
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def test_print_config_loads_back_to_the_same(capsys, tmp_path):
    assert main(["serve-rad", str(EXAMPLE), "--http.port", "9001", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["http"]["port"] == 9001
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_serving_config(again) == load_serving_config(EXAMPLE, ["--http.port", "9001"])


def test_follow_names_the_run_and_the_served_model(config_file, capsys):
    path = config_file(model={})
    assert main(["serve-rad", path, "--follow", "runs/NAME", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["follow"]["run"] == "runs/NAME"
    assert load_serving_config(path, ["--follow.run", "runs/NAME"]).model_name == "NAME"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {}}, ["model.path", "follow.run"]),
        ({"reward_models": {}}, ["reward_models", "1"]),
        ({"reward_models": {"good": {}}}, ["reward_models.good.path", "missing"]),
        ({"reward_models": {"good": {"path": "x", "score_indx": 1}}}, ["score_indx", "unknown key"]),
        ({"reward_models": {"a=b": {"path": "x"}}}, ["'a=b'", "'='"]),
        ({"rad": {"default_reward_model": "bad"}}, ["rad.default_reward_model", "'bad'", "good"]),
        ({"replicas": {"min": 3, "max": 2}}, ["replicas.max = 2", "replicas.min = 3"]),
        ({"http": {"host": "0.0.0.0"}}, ["http.host", "http.api_keys_file", "http.allow_anonymous"]),
        ({"http": {"cors_origins": ["*"]}}, ["http.cors_origins"]),
        ({"limits": {"top_k": 0}}, ["limits.top_k = 0", "at least 1"]),
    ],
)
def test_refusals_name_key_and_remedy(config_file, capsys, sections, words):
    assert main(["serve-rad", config_file(**sections), "--print-config"]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_mappings_and_lists_can_be_given_as_flags(config_file):
    flags = ["--reward_models", "{bad: {path: x}}", "--http.cors_origins", "[http://localhost:3000]"]
    config = load_serving_config(config_file(), flags)
    assert list(config.reward_models) == ["bad"]
    assert config.http.cors_origins == ("http://localhost:3000",)


def test_missing_key_variable_is_refused_before_ray_starts(config_file, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEYS", raising=False)
    assert main(["serve-rad", config_file(), "--http.api_keys_env", "NO_SUCH_KEYS"]) == 2
    assert "NO_SUCH_KEYS" in capsys.readouterr().err
