"""Scores of prefix + candidate from a sequence classifier, each sequence in full (nothing kept between steps)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from openrlhf_ebft.rad.prefixes import check_known_ids, compact_prefix, reward_model_limit
from openrlhf_ebft.rad.values import BaseCandidateValue, StepContext, check_score_transform, extract_score

# Rows of one reward-model forward; bounds memory, changes no score.
ROWS_PER_FORWARD = 64


def position_head(reward_model: nn.Module) -> nn.Module | None:
    """The head that decoder-only classifiers apply at every position (`score`), or None (encoders)."""
    head = getattr(reward_model, "score", None)
    return head if isinstance(head, nn.Module) else None


def backbone_of(reward_model: nn.Module) -> nn.Module:
    """The classifier's model without its head."""
    return getattr(reward_model, reward_model.base_model_prefix)


def _pad_id(reward_model: Any) -> int:
    """The configured pad id if the model has an embedding for it, else 0."""
    pad_id = getattr(reward_model.config.get_text_config(), "pad_token_id", None)
    known = pad_id is not None and 0 <= pad_id < reward_model.get_input_embeddings().num_embeddings
    return int(pad_id) if known else 0


class RewardModelValue(BaseCandidateValue):
    """Reward of `prefix + candidate` from an auxiliary sequence classifier (RAD, arXiv 2310.09520).

    Rules, the same on every path:
    - the score is read at the last real token, whatever its id (a candidate equal to the pad id is a candidate);
    - padding of the prefix is removed, and rows are padded on the right, masked, with the reward model's pad id or 0
      (some classifiers find the last token by that id); a classifier whose scores change with padding all the same
      (XLNet, and encoders that mix neighbouring tokens whatever the mask says) gets rows of one length at a time;
    - a sequence longer than the reward model reads keeps its LAST tokens (the candidate is always among them).

    With `shared_vocab=False` the real tokens and the candidate are decoded (special tokens of the language model
    skipped), and encoded with the reward model's tokenizer, which adds its own special tokens and cuts on the left.
    A text that encodes to no token at all is scored as the tokenizer's BOS, EOS or pad token, the first it has.

    Args:
        reward_model: a loaded sequence classifier in eval mode.
        rm_tokenizer: its tokenizer; required for `shared_vocab=False`.
        score_index: output column read as the score.
        score_transform: `none`, `sigmoid`, `softmax`.
        shared_vocab: score token ids as they are (True) or through text (False).
        max_length: tokens the reward model may read; default: what it and its tokenizer state.

    Raises:
        ValueError: no tokenizer for the text path, `score_index` outside the outputs, unknown `score_transform`.
    """

    def __init__(
        self,
        reward_model: Any,
        rm_tokenizer: Any = None,
        *,
        score_index: int = 0,
        score_transform: str = "none",
        shared_vocab: bool = True,
        max_length: int | None = None,
    ) -> None:
        if not shared_vocab and rm_tokenizer is None:
            raise ValueError("scoring through text needs the reward model's tokenizer: pass rm_tokenizer")
        columns = reward_model.config.num_labels
        if not 0 <= score_index < columns:
            raise ValueError(f"score_index {score_index} is outside the reward model's {columns} output columns")
        check_score_transform(score_transform)
        self.reward_model = reward_model
        self.rm_tokenizer = rm_tokenizer
        self.score_index = score_index
        self.score_transform = score_transform
        self.shared_vocab = shared_vocab
        self._pad_id = _pad_id(reward_model)
        self.max_length = max_length if max_length is not None else reward_model_limit(reward_model, rm_tokenizer)
        self.vocab_limit = reward_model.get_input_embeddings().num_embeddings if shared_vocab else None
        self._takes_padding = position_head(reward_model) is not None or self._ignores_padding()
        if not shared_vocab:
            # An own copy: cutting on the left is set on it, and one thread uses it at a time.
            self._encoder = copy.deepcopy(rm_tokenizer)
            self._encoder.truncation_side = "left"
            self._encoder_lock = threading.Lock()

    def score(self, ctx: StepContext) -> torch.Tensor:
        """Scores [B, K], float32, on the device of `ctx.candidate_ids`."""
        if self.reward_model is None:
            raise RuntimeError("this value was cleaned up; build a new one or call RAD.steer() again")
        real = ctx.real_tokens()
        ids, lengths = self._sequences(ctx, real) if self.shared_vocab else self._encoded_texts(ctx, real)
        scores = self.score_sequences(ids, lengths)
        return scores.view(ctx.candidate_ids.shape).to(ctx.candidate_ids.device)

    @torch.inference_mode()
    def score_sequences(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Scores [N] float32 of right-padded sequences.

        Args:
            ids: [N, L] int64; what follows a row's length is ignored.
            lengths: [N] int64, each >= 1.
        """
        device = next(self.reward_model.parameters()).device
        scores = torch.empty(ids.size(0), device=device)
        for batch in self._batches(lengths):
            logits = self._last_logits(ids[batch].to(device), lengths[batch].to(device))
            scores[batch.to(device)] = extract_score(logits, self.score_index, self.score_transform)
        return scores

    def _batches(self, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
        """Numbers of the rows of each forward."""
        if self._takes_padding:
            yield from torch.arange(lengths.numel(), device=lengths.device).split(ROWS_PER_FORWARD)
            return
        for length in lengths.unique():
            yield from torch.nonzero(lengths == length)[:, 0].split(ROWS_PER_FORWARD)

    @torch.inference_mode()
    def _ignores_padding(self) -> bool:
        """Whether a short row scores alike alone and padded beside a longer one; False where that cannot be found."""
        model = self.reward_model
        longest = min(8, self.max_length or 8)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.get_input_embeddings().num_embeddings, (2, longest), generator=generator)
        lengths = torch.tensor([(longest + 1) // 2, longest])
        ids, lengths = (tensor.to(next(model.parameters()).device) for tensor in (ids, lengths))
        try:
            padded, alone = self._last_logits(ids, lengths)[:1], self._last_logits(ids[:1], lengths[:1])
        except (RuntimeError, ValueError):  # some want an EOS in every row
            return False
        limit = 1e-4 if torch.finfo(padded.dtype).bits >= 32 else 64 * torch.finfo(padded.dtype).eps
        return torch.allclose(padded, alone, rtol=limit, atol=limit)

    def _last_logits(self, ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Logits [N, C] at the last token of each row of ids [N, L]; count [N] are the rows' lengths."""
        rows = ids[:, : int(count.max())]
        mask = (torch.arange(rows.size(1), device=rows.device)[None, :] < count[:, None]).long()
        rows = rows.masked_fill(mask == 0, self._pad_id)
        head = position_head(self.reward_model)
        if head is None:
            return self.reward_model(input_ids=rows, attention_mask=mask).logits
        hidden = backbone_of(self.reward_model)(input_ids=rows, attention_mask=mask, use_cache=False).last_hidden_state
        return head(hidden[torch.arange(rows.size(0), device=rows.device), count - 1])

    def _sequences(self, ctx: StepContext, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefix + candidate ids, [B*K, L] right-padded, and their lengths [B*K]."""
        keep = None if self.max_length is None else self.max_length - 1
        prefix, lengths = compact_prefix(ctx.prefix_ids, real, keep)
        check_known_ids(prefix, self.vocab_limit, "the prefix")
        check_known_ids(ctx.candidate_ids, self.vocab_limit, "the candidate set")
        batch, candidates = ctx.candidate_ids.shape
        ids = torch.cat([prefix, prefix.new_zeros(batch, 1)], dim=1)[:, None, :].repeat(1, candidates, 1)
        slot = lengths[:, None, None].expand(batch, candidates, 1)
        ids.scatter_(2, slot, ctx.candidate_ids[:, :, None])
        return ids.flatten(0, 1), (lengths + 1).repeat_interleave(candidates)

    def _encoded_texts(self, ctx: StepContext, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of the reward model for the text of prefix + candidate, right-padded, and their lengths."""
        if ctx.lm_tokenizer is None:
            raise ValueError("scoring through text needs the language model's tokenizer in the step context")
        sequences = []
        for row, keep, candidates in zip(ctx.prefix_ids, real, ctx.candidate_ids, strict=True):
            prefix = row[keep].tolist()
            sequences += [prefix + [candidate] for candidate in candidates.tolist()]
        texts = [
            ctx.lm_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in sequences
        ]
        limit = {"truncation": True, "max_length": self.max_length} if self.max_length is not None else {}
        with self._encoder_lock:
            encoded = self._encoder(texts, **limit)["input_ids"]
        encoded = [ids if ids else [self._stand_in()] for ids in encoded]
        lengths = torch.tensor([len(ids) for ids in encoded])
        padded = torch.zeros(len(encoded), int(lengths.max()), dtype=torch.long)
        for index, ids in enumerate(encoded):
            padded[index, : len(ids)] = torch.tensor(ids)
        return padded, lengths

    def _stand_in(self) -> int:
        tokenizer = self.rm_tokenizer
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token_id is not None:
                return int(token_id)
        raise ValueError("the text so far is empty, and the reward model's tokenizer has no BOS, EOS or pad token")

    def cleanup(self) -> None:
        self.reward_model = None
        self.rm_tokenizer = None
        self._encoder = None
