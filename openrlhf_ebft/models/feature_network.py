"""The frozen network whose hidden states are the features; it holds no block above its deepest tap and no head."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.models.hidden_states import HiddenStateTap, find_blocks, num_blocks
from openrlhf_ebft.models.loading import causal_lm_arguments
from openrlhf_ebft.models.partial_checkpoint import needed_tensors, read_tensors, tensor_files
from openrlhf_ebft.models.tree_forward import Masks, mask_arguments


def layer_index(fraction: float, num_layers: int) -> int:
    """Depth of a tap: clamp(floor(fraction * L), 1, L); ValueError unless 0 <= fraction <= 1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"a layer fraction must lie in 0..1, got {fraction}")
    # 0.29 * 100 is 28.999999999999996 in floating point, and means 29.
    return min(max(math.floor(fraction * num_layers + 1e-9), 1), num_layers)


class FeatureNetwork(nn.Module):
    """Frozen backbone with taps at fixed depths.

    Attributes:
        config: config of the shortened backbone.
        layer_indices: tapped depths, counted as transformers' `output_hidden_states` does.
        num_taps, hidden_size: the output has num_taps * hidden_size features per token.
        is_causal: False for bidirectional encoders, which need rows; causal models take rollout trees.
        ignores_padding: False for encoders that mix neighbouring tokens whatever the mask says (ConvBERT, FNet): their
            rows must have one length.
    """

    def __init__(
        self, backbone: PreTrainedModel, layer_indices: Sequence[int], num_layers: int, *, freeze: bool = True
    ) -> None:
        """
        Args:
            backbone: model without head; at least max(layer_indices) blocks.
            layer_indices: depths in 0..num_layers.
            num_layers: blocks of the whole model, of which ``backbone`` may hold the first ones only.
            freeze: turn gradients off and eval mode on for good; without, they are the caller's business.
        """
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval() if freeze else backbone
        self.config: PreTrainedConfig = backbone.config
        self.layer_indices = list(layer_indices)
        self.num_taps = len(self.layer_indices)
        self.hidden_size = int(backbone.config.get_text_config().hidden_size)
        self._tap = HiddenStateTap(backbone, self.layer_indices, num_layers=num_layers)
        self.is_causal = self._sees_only_the_past()
        self.ignores_padding = self.is_causal or self._is_alike_padded()

    def train(self, mode: bool = True) -> FeatureNetwork:
        """Stays in eval mode: a frozen network has no training mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Masks | None, position_ids: Tensor | None = None) -> Tensor:
        """Features of every token.

        Args:
            input_ids: (B, S) token ids.
            attention_mask: (B, S) of 0 and 1, or for causal models what keeps the tokens of a tree apart.
            position_ids: (B, S); bidirectional models number their positions themselves.
        Returns:
            (B, S, num_taps*hidden_size) in the network's dtype, without a graph.
        Raises:
            ValueError: a tree mask for a bidirectional model.
        """
        if self.is_causal:
            given = {**mask_arguments(attention_mask), "position_ids": position_ids}
        else:
            if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
                name = type(self.backbone).__name__
                raise ValueError(f"{name} is bidirectional: it reads rows with a (B, S) mask, not rollout trees")
            given = {"attention_mask": attention_mask}
        return self._tap(input_ids=input_ids, **{key: value for key, value in given.items() if value is not None})

    @torch.no_grad()
    def _sees_only_the_past(self) -> bool:
        """Whether changing the last token leaves the features of the tokens before it as they are."""
        middle = self.config.get_text_config().vocab_size // 2
        rows = torch.full((2, 4), middle, device=self.backbone.device)
        rows[1, -1] = middle + 1
        first, second = self._tap(input_ids=rows, attention_mask=torch.ones_like(rows))[:, :-1].float()
        return _are_alike(first, second)

    @torch.no_grad()
    def _is_alike_padded(self) -> bool:
        """Whether masked tokens behind a row leave its features as they are."""
        middle = self.config.get_text_config().vocab_size // 2
        row = torch.full((1, 4), middle, device=self.backbone.device)
        row[:, 2:] = middle + 1
        mask = (row == middle).long()
        padded = self._tap(input_ids=row, attention_mask=mask)[:, :2].float()
        return _are_alike(padded, self._tap(input_ids=row[:, :2], attention_mask=mask[:, :2]).float())


def _are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether features (..., D) are equal but for rounding."""
    change = (first - second).norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-20)
    return bool(change.max() < 1e-2)  # rounding in bfloat16 gives at most 1e-3, another token seen far more


def shortened_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of ``config`` for the first ``num_layers`` blocks; per-block lists are cut to the same length."""
    whole = int(config.num_hidden_layers)
    short = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == whole and name != "architectures" and "token" not in name:
            setattr(short, name, value[:num_layers])
    short.num_hidden_layers = num_layers
    return short


def _load_shortened(
    path: str, config: PreTrainedConfig, *, dtype: torch.dtype, attention: str, trust_remote_code: bool
) -> PreTrainedModel:
    options = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
    name, gguf = causal_lm_arguments(path)
    files = None if gguf else tensor_files(name)
    if gguf:  # transformers maps GGUF names for models with a head only, and skips blocks that the model lacks
        model, info = AutoModelForCausalLM.from_pretrained(name, config=config, **options, **gguf)
        model = model.base_model
    elif files is None:
        model, info = AutoModel.from_pretrained(name, config=config, trust_remote_code=trust_remote_code, **options)
    else:
        with torch.device("meta"):
            empty = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
        kept = int(config.num_hidden_layers)
        chosen = needed_tensors(files, empty, find_blocks(empty, kept)[0], kept)
        tensors = read_tensors(name, files, chosen)
        model, info = type(empty).from_pretrained(None, config=config, state_dict=tensors, **options)
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key and not key.startswith("lm_head"))
    if missing:
        raise ValueError(f"checkpoint {path!r} lacks {len(missing)} tensors of {type(model).__name__}: {missing[:5]}")
    pack_frozen_model(model)
    return model


def load_feature_network(
    path_or_name: str,
    layer_fractions: Sequence[float] = (0.25, 0.5, 0.75),
    dtype: torch.dtype = torch.float32,
    *,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> FeatureNetwork:
    """Loads the blocks up to the deepest tap, and nothing above, on the CPU.

    Args:
        path_or_name: local folder, hub name (only the needed shards are fetched) or .gguf file of a decoder, an
            embedding model or an encoder.
        layer_fractions: depths of the taps as fractions of the whole model's depth, each in 0..1.
        dtype: of the weights and the features.
        attention: transformers' attention implementation.
        trust_remote_code: run the repository's own Python code.
    Raises:
        ValueError: no or bad fractions, a composite or encoder-decoder model, or a checkpoint that lacks tensors.
        FileNotFoundError: a local path without a model.
    """
    name, gguf = causal_lm_arguments(path_or_name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **gguf)
    config = config.get_text_config()
    if config.is_encoder_decoder:
        raise ValueError(f"{path_or_name!r} is an encoder-decoder; a feature network is a decoder or an encoder alone")
    if not layer_fractions:
        raise ValueError("layer_fractions is empty: name at least one depth in 0..1")
    whole = int(config.num_hidden_layers)
    indices = [layer_index(fraction, whole) for fraction in layer_fractions]
    short = shortened_config(config, max(indices))
    backbone = _load_shortened(
        path_or_name, short, dtype=dtype, attention=attention, trust_remote_code=trust_remote_code
    )
    if num_blocks(backbone) != max(indices):
        raise ValueError(f"{path_or_name!r}: asked for {max(indices)} blocks, the model has {num_blocks(backbone)}")
    return FeatureNetwork(backbone, indices, whole)
