"""One prompt, one completion, as text: what `openrlhf-ebft generate` prints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.core.positions import position_limit
from openrlhf_ebft.data.tokenizers import load_tokenizer, plain_text, stop_token_ids
from openrlhf_ebft.models.loading import causal_lm_arguments, load_causal_lm
from openrlhf_ebft.models.lora import adapter_base, is_adapter_folder, load_merged


@dataclass(frozen=True)
class GenerationSettings:
    """How a completion is sampled; nothing is taken from the model folder but its stop tokens."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # 1 is off
    seed: int = 0
    chat: bool = False  # the prompt is a user turn of the tokenizer's chat template
    trust_remote_code: bool = False


def generate_text(model_path: str, prompt: str, settings: GenerationSettings, device: torch.device) -> str:
    """Returns the text that the model puts after `prompt`, without its stop token.

    Raises:
        UserError: `chat` is set and the tokenizer has no chat template, or prompt and completion are longer than the
            model reads.
        ValueError, FileNotFoundError: `model_path` holds adapters that do not fit their base model, or it is not there.
    """
    is_adapter = is_adapter_folder(model_path)
    if not is_adapter:
        causal_lm_arguments(model_path)  # says that a folder is not there better than a tokenizer that is not found
    tokenizer = load_tokenizer(model_path, trust_remote_code=settings.trust_remote_code)
    ids = _encode(prompt, tokenizer, settings.chat, model_path)
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    load = load_merged if is_adapter else load_causal_lm
    model = load(model_path, dtype=dtype, trust_remote_code=settings.trust_remote_code).to(device).eval()
    positions = position_limit(model.config.get_text_config())
    if positions is not None and len(ids) + settings.max_new_tokens > positions:
        raise UserError(
            f"{model_path} has {positions} positions, but the prompt has {len(ids)} tokens and --max-new-tokens is "
            f"{settings.max_new_tokens}: shorten one of them"
        )
    stops = stop_token_ids(tokenizer, adapter_base(model_path) if is_adapter else model_path)
    # The model's own object, too: generate() fills every field that is not set from it.
    model.generation_config = _sampling(settings, tokenizer, stops)
    torch.manual_seed(settings.seed)
    inputs = torch.tensor([ids], device=device)
    with torch.inference_mode():
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs))
    return plain_text(output[0, len(ids) :].tolist(), tokenizer, stops)


def _encode(prompt: str, tokenizer: PreTrainedTokenizerBase, chat: bool, model_path: str) -> list[int]:
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise UserError(f"{model_path} has no chat template: leave --chat out")
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _sampling(
    settings: GenerationSettings, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]
) -> GenerationConfig:
    sampled = settings.temperature > 0
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=sampled,
        temperature=settings.temperature if sampled else None,
        top_p=settings.top_p if sampled else None,
        top_k=0 if sampled else None,
        eos_token_id=list(stops),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
