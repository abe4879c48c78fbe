"""Every named architecture loads as a sequence classifier and reaches the right scoring path."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import GraniteMoeHybridConfig, Olmo2Config

from openrlhf_ebft.rad import RAD, load_sequence_classifier
from openrlhf_ebft.rad.loading import sequence_classifier_class
from tests.rad.conftest import GATED, SPREAD, configs, encoder_configs, make_lm, make_tokenizer, save_classifier

HEADLESS = {
    "granite": configs()["granite"],
    "olmo2": Olmo2Config(**GATED, **SPREAD, pad_token_id=1),
    "granite_hybrid": GraniteMoeHybridConfig(
        **GATED,
        shared_intermediate_size=48,
        num_local_experts=1,
        num_experts_per_tok=1,
        layer_types=["attention", "attention"],
        mamba_expand=1,
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_d_conv=2,
    ),
}


def decoders() -> list[str]:
    return [name for name in sorted(configs()) if name != "granite"]


@pytest.mark.parametrize("name", decoders() + sorted(encoder_configs()))
def test_known_classifiers_load(name, tmp_path):
    config = {**configs(), **encoder_configs()}[name]
    model, tokenizer = load_sequence_classifier(save_classifier(tmp_path, config, labels=3))
    assert model.config.num_labels == 3 and not model.training
    assert tokenizer.padding_side == "right" and model.config.pad_token_id is not None


@pytest.mark.parametrize("name", sorted(HEADLESS))
def test_models_without_a_classifier_class(name, tmp_path):
    """The head is built on the backbone, survives saving, and reaches the cached path."""
    make_lm(HEADLESS[name]).save_pretrained(tmp_path / "lm")
    make_tokenizer().save_pretrained(tmp_path / "lm")
    with pytest.warns(UserWarning, match=r"holds no weights for score\.weight"):
        model, tokenizer = load_sequence_classifier(tmp_path / "lm", hf_model_kwargs={"num_labels": 1})
    assert type(model).__name__.endswith("ForSequenceClassification") and model.score.out_features == 1
    model.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    lm = make_lm(configs()["llama"])
    rad = RAD(beta=1.0, reward_model_id=str(tmp_path / "reward"), verify=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rad.steer(lm, tokenizer)
    assert rad.scoring_path == "cached"
    assert torch.equal(rad._value.reward_model.score.weight, model.score.weight)
    prompt = torch.tensor([[3, 4]])
    lm.generate(prompt, max_new_tokens=3, logits_processor=rad.get_logits_processors(prompt, {}), pad_token_id=1)


def test_model_types_without_a_backbone(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert"}}'
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        sequence_classifier_class(tmp_path)


def test_pad_falls_back_to_eos(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    folder = save_classifier(tmp_path, configs()["gpt2"], tokenizer=tokenizer)
    _, loaded = load_sequence_classifier(folder)
    assert loaded.pad_token == "<eos>"


def test_missing_folder():
    with pytest.raises(OSError, match="no_such_folder"):
        load_sequence_classifier("no_such_folder")
