"""Reward models in the format of the authors' trainer, built here as that trainer builds them."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from openrlhf_ebft.cli.convert_reward import main
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.rad import RewardModelValue, load_sequence_classifier
from openrlhf_ebft.rad.convert import bias_shift, convert_reward_model
from tests.rad.conftest import VOCAB, make_tokenizer

ROWS = [[3, 4, 5, 6, 7], [8, 9], [10]]


class AuthorsModel(nn.Module):
    """GPT-2 whose LM head is a linear layer with few outputs and a bias; scores are read at the last token."""

    def __init__(self, outputs: int, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=hidden, n_layer=2, n_head=heads, n_positions=32, initializer_range=0.3
        )
        self.model = GPT2LMHeadModel(config)
        self.model.lm_head = nn.Linear(hidden, outputs, bias=True)
        nn.init.normal_(self.model.lm_head.bias, std=2.0)

    def scores(self, row: list[int]) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.model.eval().transformer(torch.tensor([row])).last_hidden_state
            return self.model.lm_head(hidden[0, -1])

    def weights(self) -> dict[str, torch.Tensor]:
        """The state dict with the causal-mask buffers that older library versions kept."""
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        for block in range(2):
            state[f"model.transformer.h.{block}.attn.bias"] = torch.ones(1, 1, 32, 32)
            state[f"model.transformer.h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
        return state


@pytest.mark.parametrize("outputs", [1, 7])
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_scores_are_kept(outputs, kind, tmp_path, capsys):
    source = AuthorsModel(outputs)
    folder = tmp_path / "source"
    folder.mkdir()
    make_tokenizer().save_pretrained(folder)
    if kind == "bin":
        torch.save(source.weights(), folder / "pytorch_model.bin")
    else:
        save_file(source.weights(), folder / "model.safetensors")
    assert main([str(folder), str(tmp_path / "out"), "--num-heads", "4"]) == 0
    assert "score_transform none" in capsys.readouterr().out
    model, _ = load_sequence_classifier(tmp_path / "out")
    padded = torch.zeros(3, 5, dtype=torch.long)
    for index, row in enumerate(ROWS):
        padded[index, : len(row)] = torch.tensor(row)
    for column in range(outputs):
        got = RewardModelValue(model, score_index=column).score_sequences(padded, torch.tensor([5, 2, 1]))
        want = torch.stack([source.scores(row)[column] for row in ROWS])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_heads_from_config_and_from_the_width(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    make_tokenizer().save_pretrained(folder)
    torch.save(AuthorsModel(1).weights(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"n_head": 4, "model_type": "gpt2"}))
    model, _ = load_sequence_classifier(convert_reward_model(folder, tmp_path / "a"))
    assert model.config.n_head == 4
    torch.save(AuthorsModel(1, hidden=128, heads=2).weights(), folder / "pytorch_model.bin")
    (folder / "config.json").unlink()
    model, _ = load_sequence_classifier(convert_reward_model(folder, tmp_path / "b"))
    assert model.config.n_head == 2


def test_faults_are_named(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    with pytest.raises(UserError, match="neither model.safetensors nor pytorch_model.bin"):
        main([str(folder), str(tmp_path / "out")])
    weights = AuthorsModel(1).weights()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        convert_reward_model(folder, tmp_path / "out", num_heads=4)
    with pytest.raises(ValueError, match="5 attention heads do not divide the hidden size 32"):
        convert_reward_model(folder, tmp_path / "out", num_heads=5)
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a GPT-2 with a linear head: .*lm_head.weight missing; it holds a"):
        convert_reward_model(folder, tmp_path / "out")
    del weights["model.transformer.h.1.ln_1.bias"]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"missing transformer\.h\.1\.ln_1\.bias"):
        convert_reward_model(folder, tmp_path / "out", num_heads=4)
    torch.save(weights | {"model.lm_head.weight": torch.zeros(VOCAB, 32)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a language model, not a reward model"):
        convert_reward_model(folder, tmp_path / "out", num_heads=4)


def test_files_with_code_are_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("this must not run",)

    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        write({"model.lm_head.weight": Evil()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"pytorch_model\.bin .*read with weights_only, so nothing in it was run"):
            main([str(tmp_path), str(tmp_path / "out")])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"x" * 100, "no safetensors file, or damaged"),
        ("pytorch_model.bin", b"", "is damaged"),
        ("pytorch_model.bin", {1: torch.zeros(1)}, "must hold a state dict of tensors"),
        ("pytorch_model.bin", {"model.transformer.wpe.weight": None}, "transformer.wpe.weight missing"),
        ("pytorch_model.bin", {"model.transformer.h.0.mlp.c_fc.weight": None}, "mlp.c_fc.weight missing"),
        ("pytorch_model.bin", {"model.transformer.ln_f.bias": torch.zeros(5)}, "does not fit a GPT-2 classifier"),
        ("pytorch_model.bin", {"model.lm_head.weight": torch.zeros(32)}, r"head must be \[outputs, hidden\]"),
        ("pytorch_model.bin", {"model.lm_head.bias": torch.zeros(3)}, r"weight \(1, 32\) and bias \(3,\)"),
        ("pytorch_model.bin", {"model.lm_head.weight": torch.full((1, 32), torch.nan)}, "values that are not finite"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json must hold an object"),
        ("config.json", b'{"n_head": "4"}', "'4' attention heads do not divide the hidden size 32"),
    ],
)
def test_damaged_sources_are_named(name, content, message, tmp_path):
    weights = AuthorsModel(1).weights()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        changed = {key: tensor for key, tensor in (weights | content).items() if tensor is not None}
        torch.save(changed, tmp_path / name)
    heads = [] if name == "config.json" else ["--num-heads", "4"]
    with pytest.raises(UserError, match=message):
        main([str(tmp_path), str(tmp_path / "out"), *heads])


def test_attention_as_the_config_states_it(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    source = AuthorsModel(1)
    torch.save(source.weights(), tmp_path / "pytorch_model.bin")
    stated = {"n_head": 4, "scale_attn_by_inverse_layer_idx": True}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    model, _ = load_sequence_classifier(convert_reward_model(tmp_path, tmp_path / "out"))
    for name, value in stated.items():
        assert getattr(model.config, name) == value


def test_dependent_rows_are_an_error():
    assert bias_shift(torch.tensor([[2.0, 0.0]]), torch.tensor([3.0])).tolist() == [1.5, 0.0]
    with pytest.raises(ValueError, match="dependent rows"):
        bias_shift(torch.ones(2, 4), torch.tensor([1.0, 2.0]))
