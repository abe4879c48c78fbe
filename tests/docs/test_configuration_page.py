"""docs/configuration.md is what the configuration classes say."""

import re
from pathlib import Path

import pytest

from openrlhf_ebft.config.keys import iterate_fields
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.config.sections import EBFTConfig
from scripts.config_reference import allowed, render_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_page(), "docs/configuration.md is out of date: run make docs"


def test_page_has_every_key_once_and_no_other():
    keys = re.findall(r"^\| `([a-z_.]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    expected = [".".join(path) for model in (EBFTConfig, RewardConfig) for path, _ in iterate_fields(model)]
    assert keys == expected


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("seed", "| `seed` | `0` | whole number >= 0 and < 4294967296 |"),
        ("model.path", "| `model.path` | **required** | text |"),
        ("data.split", '| `data.split` | `"train"` | text |'),
        ("rollout.top_p", "| `rollout.top_p` | `1.0` | number > 0 and <= 1 |"),
        ("optimizer.betas", "| `optimizer.betas` | `[0.9, 0.95]` | list of 2: each number >= 0 and < 1 |"),
        ("deepspeed.zero_stage", "| `deepspeed.zero_stage` | `0` | `0`, `1`, `2`, `3` |"),
        ("policy.max_steps", "| `policy.max_steps` | `null` | whole number >= 0, `null` |"),
    ],
)
def test_rows_read_as_the_schema_says(key, row):
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{key}` |")]
    assert line.startswith(row)


def test_an_unknown_type_is_an_error_and_not_a_gap():
    with pytest.raises(KeyError):
        allowed({"type": "object"})
