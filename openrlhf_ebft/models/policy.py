"""The policy: log-probabilities of completions and ground truths from one pass over a batch of trees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from openrlhf_ebft.core.attention import AttentionMode
from openrlhf_ebft.core.logprobs import Predictions, chunked_logprobs
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.head_probe import check_head
from openrlhf_ebft.models.lora import LoRAAdapters, keep_adapters
from openrlhf_ebft.models.split_attention import IMPLEMENTATION, require_split_attention
from openrlhf_ebft.models.tree_forward import (
    Masks,
    attention_spec,
    forward_tree,
    mask_arguments,
    require_tree_attention,
    rows_spec,
    set_flex_attention,
)


@dataclass(frozen=True, eq=False)
class TreeLogprobs:
    """What the loss needs of one batch: B branch tokens, R supervised reference tokens."""

    branch: Tensor  # (B,) float32, nats, at the sampling temperature
    branch_entropy: Tensor  # (B,) float32, nats, of the same distributions
    supervised: Tensor  # (R,) float32, nats, at temperature 1


class PolicyModel(nn.Module):
    """A causal language model read over rollout trees; one module, so that DeepSpeed can wrap the whole pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        mode: AttentionMode,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = True,
        adapters: LoRAAdapters | None = None,
    ) -> None:
        """
        Args:
            model: the causal language model.
            mode: how tree attention runs.
            temperature: that of sampling.
            chunk_tokens: bounds how many tokens' logits exist at one time.
            with_entropy: entropies carry gradients; without, they only can be looked at, which costs less.
            adapters: those inside `model`, if it has some.
        """
        super().__init__()
        self.model = model
        self.mode = mode
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.with_entropy = with_entropy
        self.adapters = adapters
        if adapters is not None:
            self.register_state_dict_post_hook(keep_adapters)
        self.spec = None
        if mode == "split":
            require_split_attention(model)
            model.set_attn_implementation(IMPLEMENTATION)
        elif mode == "rows":
            self.spec = rows_spec(model.config, model.config._attn_implementation)
        else:
            require_tree_attention(model)
            if mode == "flex":
                set_flex_attention(model)
            self.spec = attention_spec(model.config, model.config._attn_implementation)
        self.head = LogitsHead(model)

    def num_chunks(self, batch: TreeBatch) -> int:
        """Pieces in which the logits of `batch` are computed."""
        return max(1, math.ceil((batch.branch_tokens.numel() + batch.supervised_targets.numel()) / self.chunk_tokens))

    def forward(self, batch: TreeBatch, num_chunks: int | None = None) -> TreeLogprobs:
        """Log-probabilities of every branch token and every supervised token of `batch` (on the model's device).

        `num_chunks` overrides the number of pieces, for ranks that must agree on it.
        """
        pruned = batch.without_last_tokens()
        hidden = forward_tree(self._backbone, pruned, self.mode, self.spec, self.model.dtype).flatten(0, 1)
        predictors = torch.cat([batch.pruned_predictors(pruned), pruned.supervised_predictors])
        predictors = pruned.first_alike[predictors]  # samples that agree so far have one distribution
        targets = torch.cat([batch.branch_tokens, batch.supervised_targets])
        num_branch = batch.branch_tokens.numel()
        temperature = torch.ones(targets.numel(), device=hidden.device)
        temperature[:num_branch] = self.temperature
        wanted = Predictions.of(predictors, targets, temperature)
        logprobs, entropy = chunked_logprobs(
            self.head,
            hidden,
            wanted,
            num_chunks or self.num_chunks(batch),
            with_entropy=self.with_entropy,
            weights_move=self.head.has_frozen_shards(),
        )
        return TreeLogprobs(logprobs[:num_branch], entropy[:num_branch], logprobs[num_branch:])

    def _backbone(self, input_ids: Tensor, masks: Masks, position_ids: Tensor) -> Tensor:
        backbone = self.model.base_model
        output = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **mask_arguments(masks))
        return output.last_hidden_state


class LogitsHead:
    """The part of a causal language model after its backbone, with the scaling that some families apply to logits.

    Gemma caps logits with tanh; others multiply (Cohere, Falcon-H1, HyperCLOVA X) or divide them (Granite) by a
    constant of the config.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a model whose logits are more than that, as far as can be found (`check_head`)."""
        _require_plain_head(model)
        self._model = model
        config = model.config.get_text_config()
        cap = "logits_soft_cap" if config.model_type == "recurrent_gemma" else "final_logit_softcapping"
        self.softcap = _constant(config, cap)
        self.scale = _constant(config, "lm_head_multiplier") or _constant(config, "output_multiplier") or 1.0
        if config.model_type != "mpt":  # transformers does not read MPT's
            self.scale *= _constant(config, "logit_scale") or 1.0
        scaling = _constant(config, "logits_scaling") or 1.0
        self.scale *= scaling if config.model_type.startswith("hyperclovax") else 1 / scaling
        check_head(model, self)

    def has_frozen_shards(self) -> bool:
        """Whether weights are frozen and gathered by ZeRO-3 for each call."""
        weights = self._model.get_output_embeddings().parameters()
        return any(hasattr(weight, "ds_id") and not weight.requires_grad for weight in weights)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(P, H) hidden states after the final norm -> (P, V) logits."""
        logits = self._model.get_output_embeddings()(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _constant(config: PreTrainedConfig, name: str) -> float | None:
    return getattr(config, name, None)


def _require_plain_head(model: PreTrainedModel) -> None:
    own = {id(weight) for weight in model.base_model.parameters()}
    own |= {id(weight) for weight in model.get_output_embeddings().parameters()}
    between = [name for name, weight in model.named_parameters() if id(weight) not in own]
    if between:
        raise ValueError(
            f"{type(model).__name__} has weights between its last block and its logits, such as {between[0]}: its "
            "log-probabilities cannot be computed piece by piece, so it cannot be a policy"
        )
