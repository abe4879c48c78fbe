"""A small rollout tree of a configuration's own data and model, for pictures."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference, RolloutRequest
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.data.load import load_data
from openrlhf_ebft.data.tokenizers import load_run_tokenizer
from openrlhf_ebft.rollouts.engine import build_engine
from openrlhf_ebft.trainer.run import sampling_settings

_TOKENS = 32  # where the user names no number: still readable as a picture


def sample_tree(config: EBFTConfig, tokens: int | None, samples: int) -> tuple[RolloutTree, PreTrainedTokenizerBase]:
    """Samples completions at the anchors in the first `tokens` tokens of the first training reference.

    None stands for 32, or for as many as the first anchor and its ground truth need. Raises UserError when none of its
    anchors fits.
    """
    tokenizer = load_run_tokenizer(config)
    train, _, _ = load_data(config, tokenizer)
    reference = _beginning(train[0], tokens)
    rollout = config.rollout.model_copy(update={"engine": "transformers", "weight_transfer": "auto"})
    engine = build_engine(
        config.model.path,
        rollout,
        sampling_settings(config, tokenizer),
        dtype=config.model.dtype,
        max_model_len=int((reference.anchors + reference.max_new_tokens).max()) + 1,
        seed=config.seed,
        threads=config.placement.threads_per_actor,
        trust_remote_code=config.model.trust_remote_code,
    )
    seed = derive_seed(config.seed, "picture", reference.example_id)
    (made,) = engine.generate([RolloutRequest(reference, num_samples=samples, seed=seed)])
    return RolloutTree.from_rollout(reference, made), tokenizer


def _beginning(reference: Reference, wanted: int | None) -> Reference:
    ends = reference.anchors + reference.window_lengths
    first = int(ends.min())
    tokens = max(_TOKENS, first) if wanted is None else wanted
    keep = ends <= tokens
    if not bool(keep.any()):
        raise UserError(f"--tokens {tokens}: the first anchor and its ground truth need {first}")
    documents = reference.document_ids
    return replace(
        reference,
        token_ids=reference.token_ids[:tokens],
        loss_mask=reference.loss_mask[:tokens],
        document_ids=None if documents is None else documents[:tokens],
        anchors=reference.anchors[keep],
        window_lengths=reference.window_lengths[keep],
        max_new_tokens=reference.max_new_tokens[keep],
    )
