"""Tokenizers, made ready: a pad token, the configured chat template, and the ids that stop a completion."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import jinja2
import jinja2.sandbox
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from openrlhf_ebft.config.errors import one_line
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.data.errors import DataError

logger = logging.getLogger(__name__)


def load_run_tokenizer(config: EBFTConfig) -> PreTrainedTokenizerBase:
    """Returns the tokenizer that a run's configuration asks for."""
    model, data = config.model, config.data
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)
    if data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(data.chat_template)
    return tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, a hub name or a .gguf file; a missing pad token becomes EOS, said in the log.

    Raises:
        DataError: there is none, or it has no EOS token.
    """
    local = Path(path)
    source = {"gguf_file": local.name} if local.suffix == ".gguf" else {}
    try:
        folder = str(local.parent) if source else path
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **source)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, struct.error) as error:
        raise DataError(f"tokenizer {path!r} could not be loaded: {one_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {path!r} has no EOS token: completions could never stop")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("tokenizer %r has no pad token: its EOS %r pads, masked out", path, tokenizer.eos_token)
    return tokenizer


def read_chat_template(path: str) -> str:
    """Returns the text of a Jinja chat template file.

    Raises:
        DataError: no such file, not UTF-8, or not valid Jinja.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template = {path}: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"data.chat_template = {path}, line {error.lineno}: {error.message}") from None
    return text


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str) -> tuple[int, ...]:
    """Returns the ids that end a completion, ascending: the tokenizer's EOS and those of the model's generation config.

    Chat models often end a turn with another token than the tokenizer's EOS; only the ids are taken from the
    generation config, none of its sampling settings.

    Raises:
        DataError: the generation config gives something else than token ids.
    """
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    local = Path(model_path)
    if local.suffix == ".gguf":
        return tuple(sorted(ids))
    if local.is_dir() and not (local / "generation_config.json").exists():
        return tuple(sorted(ids))
    try:
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    except (OSError, json.JSONDecodeError, TypeError) as error:  # TypeError: the file holds no object
        logger.warning("no generation config of %r (%s): only the tokenizer's EOS stops completions", model_path, error)
        declared = None
    listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool):
            where = f"generation_config.json of {model_path!r}: eos_token_id = {declared!r}"
            raise DataError(f"{where}: must be a token id or a list of them, not {token!r}")
    return tuple(sorted(ids.union(listed)))


def unpooled_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str) -> tuple[int, ...]:
    """Returns the ids that say nothing of a completion's content, ascending: special tokens, and all that end one.

    A chat model's end of turn is often no special token of its tokenizer; pooled, it would make every end alike.
    """
    return tuple(sorted({*tokenizer.all_special_ids, *stop_token_ids(tokenizer, model_path)}))


def plain_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> str:
    """The text of token ids without special tokens, and without the stop token at their end.

    `stops` are the `stop_token_ids`: a chat model's end of turn is often no special token of its tokenizer.
    """
    content = token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids
    return str(tokenizer.decode(list(content), skip_special_tokens=True, clean_up_tokenization_spaces=False))
