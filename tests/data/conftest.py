import json

import pytest

from openrlhf_ebft.config.sections import EBFTConfig
from tests.tiny_models import CHAT_TEMPLATE, tiny_byte_tokenizer, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Lower-case BPE; "hello" is one token. No BOS, no chat template."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    return tiny_byte_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows as JSON lines and returns the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config():
    """A configuration with everything used for training; keyword arguments are keys of the data section."""

    def make(path, **data):
        rollout = data.pop("rollout", {})
        section = {"path": str(path), "heldout_fraction": 0.0, **data}
        return EBFTConfig.model_validate(
            {
                "name": "t",
                "model": {"path": "m"},
                "data": section,
                "rollout": rollout,
                "evaluation": {"max_examples": 0},
            }
        )

    return make
