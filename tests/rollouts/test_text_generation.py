"""A prompt's completion as text: greedy decoding of exactly this model, whatever its folder's sampling settings."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.rollouts.text_generation import GenerationSettings, generate_text
from tests.tiny_models import EOS_ID, tiny_byte_tokenizer, tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_byte_tokenizer(path)
    tiny_llama(path, vocab=len(tokenizer))
    return path


def greedy(folder, prompt, count):
    """The same by hand: one full forward a token, the largest logit."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt)["input_ids"]
    new = []
    while len(new) < count and EOS_ID not in new:
        with torch.inference_mode():
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return tokenizer.decode(new, skip_special_tokens=True)


def test_greedy_completion(folder):
    expected = greedy(folder, "hello", 12)
    assert expected
    assert generate_text(str(folder), "hello", GenerationSettings(max_new_tokens=12), CPU) == expected


def test_case_b45_generation_config_of_the_folder_does_not_leak(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 9.0, "repetition_penalty": 9.0}
    (copy / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": EOS_ID, "max_length": 3}))
    expected = greedy(folder, "hello", 12)
    assert generate_text(str(copy), "hello", GenerationSettings(max_new_tokens=12), CPU) == expected
    sampling = GenerationSettings(max_new_tokens=12, temperature=5.0, seed=3)
    assert generate_text(str(copy), "hello", sampling, CPU) == generate_text(str(folder), "hello", sampling, CPU)


def test_case_b17_prompts_beyond_the_positions_are_refused_with_all_numbers(folder):
    with pytest.raises(UserError, match=r"512 positions, but the prompt has 509 tokens and --max-new-tokens is 4"):
        generate_text(str(folder), "x" * 509, GenerationSettings(max_new_tokens=4), CPU)
    assert generate_text(str(folder), "x" * 508, GenerationSettings(max_new_tokens=4), CPU)


def test_a_stop_token_that_is_not_special_is_left_out(folder, tmp_path):
    """Chat models often end a turn with one."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert greedy(copy, "hello", 1), "the first token is text"
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(EOS_ID, 250))}))
    assert generate_text(str(copy), "hello", GenerationSettings(max_new_tokens=4), CPU) == ""


def test_sampling_repeats_with_its_seed(folder):
    texts = [
        generate_text(str(folder), "hello", GenerationSettings(max_new_tokens=16, temperature=2.0, seed=seed), CPU)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_chat_without_template_is_an_error(folder):
    with pytest.raises(UserError, match="has no chat template: leave --chat out"):
        generate_text(str(folder), "hello", GenerationSettings(chat=True), CPU)
