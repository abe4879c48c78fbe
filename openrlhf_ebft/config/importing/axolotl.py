"""Axolotl's configuration with `rl: ebft`: the sections `ebft`, `trl`, `vllm` and the keys around them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from openrlhf_ebft.config.importing.translation import Translation, largest_divisor, safe_name

# Defaults there that differ from ours, or that decide what a translated key means. Keys as paths.
DEFAULTS: dict[str, Any] = {
    "ebft.mode": "structured",
    "ebft.embed_method": "last_token",
    "ebft.use_whitening": False,
    "ebft.ce_coef": 0.0,
    "ebft.advantage_estimator": "rloo",
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "weight_decay": 0.0,
    "val_set_size": 0.0,
    "seed": 42,
}
_STRIDED_DEFAULTS: dict[str, Any] = {"ebft.n_samples_per_prompt": 4, "ebft.temperature": 0.6}
_STRUCTURED_DEFAULTS: dict[str, Any] = {
    "trl.scale_rewards": True,
    "trl.num_generations": 8,
    "trl.max_completion_length": 256,
    "trl.temperature": 1.0,
    "trl.loss_type": "dapo",
}

_SAME = {
    "base_model": "model.path",
    "base_model_config": "model.tokenizer",
    "tokenizer_config": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "num_epochs": "policy.epochs",
    "max_steps": "policy.max_steps",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_ratio",
    "max_grad_norm": "optimizer.max_grad_norm",
    "adam_epsilon": "optimizer.eps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "evaluation.every_steps",
    "use_tensorboard": "logging.tensorboard",
    "wandb_project": "logging.wandb_project",
    "ebft.feature_layers": "features.layer_fractions",
    "ebft.ce_coef": "policy.ce_coef",
    "ebft.rl_coef": "policy.rl_coef",
    "vllm.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm.tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm.max_model_len": "rollout.max_model_len",
    "vllm.enforce_eager": "rollout.enforce_eager",
}
_SAME_STRIDED = {
    "ebft.stride": "data.stride",
    "ebft.context_length": "data.context_length",
    "ebft.generate_max_len": "data.generate_max_len",
    "ebft.n_samples_per_prompt": "rollout.samples_per_prompt",
    "ebft.temperature": "rollout.temperature",
    "ebft.top_p": "rollout.top_p",
    "ebft.min_completion_prefix": "data.min_completion_prefix",
    "sequence_len": "data.sequence_length",
}
_SAME_STRUCTURED = {
    "trl.num_generations": "rollout.samples_per_prompt",
    "trl.max_completion_length": "rollout.max_new_tokens",
    "trl.temperature": "rollout.temperature",
    "trl.top_p": "rollout.top_p",
    "trl.beta": "policy.kl_coef",
    "trl.num_iterations": "policy.updates_per_batch",
}
_SPEED = "how a pass is computed is decided here (model.attention)"
_SERVER = "engines are actors of the run: there is no server to reach"
_DROPPED: dict[str, str] = {
    **dict.fromkeys(
        (
            "flash_attention", "sdp_attention", "flex_attention", "attn_implementation", "xformers_attention",
            "torch_compile", "gradient_checkpointing_kwargs", "sample_packing", "pad_to_sequence_len", "tf32",
        ),
        _SPEED,
    ),
    **dict.fromkeys(
        (
            "trl.vllm_server_host", "trl.vllm_server_port", "trl.vllm_server_timeout", "trl.vllm_mode", "vllm.host",
            "vllm.port", "vllm.serve_module", "trl.vllm_lora_sync", "trl.vllm_sync_interval",
        ),
        _SERVER,
    ),
    "rl": "always energy-based fine-tuning here",
    "special_tokens": "special tokens are the tokenizer's; a missing pad token becomes EOS, masked out",
    "chat_template": "the tokenizer's template is used; another one is a file (data.chat_template)",
    "logging_steps": "every step is recorded",
    "wandb_name": "the run's name is used",
    "wandb_entity": "set WANDB_ENTITY",
    "trl.async_prefetch": "a step samples with the weights of its beginning",
    "trl.generation_kwargs": "stop tokens are the tokenizer's and those of the model's generation config",
    "trl.chat_template_kwargs": "not offered: write them into a template (data.chat_template)",
    "trl.sync_ref_model": "the reference model stays as it is",
    "trl.log_completions": "samples are in the run's report",
    "dataset_prepared_path": "data is prepared in seconds, not kept",
    "tokenizer_type": "found by transformers",
    "model_type": "found by transformers",
    "strict": "unknown keys are always errors here",
    "load_in_8bit": "adapters are trained on unquantised weights here",
    "load_in_4bit": "adapters are trained on unquantised weights here",
}  # fmt: skip
_AGGREGATIONS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "dr_grpo"}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def translate(nested: Mapping[str, Any]) -> Translation:
    """Translates one configuration."""
    flat = dict(_flatten(nested))
    is_strided = flat.get("ebft.mode", "structured") == "strided"
    t = Translation(flat, DEFAULTS | (_STRIDED_DEFAULTS if is_strided else _STRUCTURED_DEFAULTS))
    t.take("ebft.mode", {"data.mode": "strided" if is_strided else "structured"})
    t.map_simple(_SAME | (_SAME_STRIDED if is_strided else _SAME_STRUCTURED))
    _name_and_data(t, is_strided)
    _features(t, is_strided)
    _loss(t, is_strided)
    _batches(t, is_strided)
    _optimizer(t)
    _adapters(t)
    _engine(t, is_strided)
    t.drop_all(_DROPPED)
    for key in (*_SAME_STRIDED, *_SAME_STRUCTURED):
        t.drop(key, "read only in the other mode (ebft.mode)")
    t.finish("not known: nothing here reads it")
    return t


def _flatten(nested: Mapping[str, Any]) -> Any:
    """Keys by path, inside the sections that belong to this method; other mappings stay whole."""
    for key, value in nested.items():
        if key in ("ebft", "trl", "vllm") and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _name_and_data(t: Translation, is_strided: bool) -> None:
    path = str(t.value("output_dir") or "ebft")
    t.keep("name", safe_name(path.rstrip("/").rsplit("/", 1)[-1]))
    t.drop("output_dir", f"its last part is the run's name, {t.data['name']}; runs lie under logging.root")
    datasets = t.value("datasets") or [{}]
    first = datasets[0] if isinstance(datasets[0], Mapping) else {"path": datasets[0]}
    source = f"{first.get('path')}:{first['name']}" if first.get("name") else first.get("path")
    targets: dict[str, Any] = {"data.path": source} if source else {}
    if first.get("split"):
        targets["data.split"] = first["split"]
    kind = str(first.get("type", ""))
    why = "name your columns"
    if kind.startswith("ebft_opencode"):
        targets |= {"data.prompt_column": "input", "data.ground_truth_column": "output"}
        why = f"{kind} reads the columns input and output"
    elif is_strided and "structured" not in kind:
        targets["data.text_column"] = "text"
        why = f"{kind or 'the data set'} is taken to hold raw text in the column text"
    if len(datasets) > 1:
        why += f"; only the first of {len(datasets)} data sets is taken: put them into one folder of files"
    t.take("datasets", targets, changed=why)
    share = float(t.value("val_set_size") or 0.0)
    held_out = {"data.heldout_fraction": share} if 0 < share < 1 else {}
    if held_out:
        t.take("val_set_size", held_out)
    elif share == 0:
        why = "no validation rows: no held-out evaluation"
        t.take("val_set_size", {"data.heldout_fraction": 0.0, "evaluation.max_examples": 0}, changed=why)
    t.drop("val_set_size", "a count of rows there: the default share is held out (data.heldout_fraction)")
    if "sequence_len" in t and not is_strided:
        limit = int(t.value("sequence_len"))
        t.take("sequence_len", {"data.max_prompt_tokens": limit}, changed="limits the prompt alone here")


def _features(t: Translation, is_strided: bool) -> None:
    t.take("ebft.use_whitening", {"features.whitening": "feature" if t.value("ebft.use_whitening") else "none"})
    pooling = str(t.value("ebft.embed_method"))
    ours = "completion_mean" if is_strided and pooling == "mean_pooling" else pooling
    t.take(
        "ebft.embed_method", {"features.embed_method": ours}, changed="" if ours == pooling else "mean of the window"
    )
    t.keep("features.normalize", "per_layer" if is_strided else "none")  # what its two trainers do, without a key
    halved = "" if is_strided else "rewards there are half as large (docs/conventions.md)"
    for key, path in {"alignment_coef": "reward.alignment_coef", "diversity_coef": "reward.diversity_coef"}.items():
        if f"ebft.{key}" in t:
            t.take(f"ebft.{key}", {path: t.value(f"ebft.{key}")}, changed=halved)
    if is_strided:
        return
    if "ebft.adaptive_max_tokens" in t and not t.value("ebft.adaptive_max_tokens"):
        why = "completions may be as long as rollout.max_new_tokens"
        t.take("ebft.adaptive_max_tokens", {"rollout.length_multiplier": 1000.0}, changed=why)
        t.drop("ebft.gt_length_multiplier", "not used there without adaptive_max_tokens")
    t.drop("ebft.adaptive_max_tokens", "always so here")
    if "ebft.gt_length_multiplier" in t:
        t.take("ebft.gt_length_multiplier", {"rollout.length_multiplier": t.value("ebft.gt_length_multiplier")})


def _loss(t: Translation, is_strided: bool) -> None:
    if is_strided:
        t.take("ebft.advantage_estimator", {"reward.advantage": t.value("ebft.advantage_estimator")})
        return
    t.drop("ebft.advantage_estimator", "the structured trainer there takes it from trl.scale_rewards")
    scaled = bool(t.value("trl.scale_rewards"))
    why = "minus the group's mean" + (", over its standard deviation" if scaled else "")
    t.take("trl.scale_rewards", {"reward.advantage": "group_norm" if scaled else "dr_grpo"}, changed=why)
    kind = str(t.value("trl.loss_type"))
    if kind in _AGGREGATIONS:
        t.take("trl.loss_type", {"policy.aggregation": _AGGREGATIONS[kind]})
    t.drop("trl.loss_type", f"{kind} is not offered: policy.aggregation keeps its default")
    if int(t.value("trl.num_iterations") or 1) > 1:
        low = t.value("trl.epsilon") or 0.2
        t.keep("policy.loss", "ppo")
        t.take("trl.epsilon", {"policy.clip_low": low, "policy.clip_high": t.value("trl.epsilon_high") or low})
        t.drop("trl.epsilon_high", "see policy.clip_high")
    t.drop("trl.epsilon", "one update a batch: every ratio is 1 and nothing is clipped")
    t.drop("trl.epsilon_high", "one update a batch: nothing is clipped")
    top_k = t.value("trl.top_k")
    if top_k is not None and int(top_k) > 0:
        t.take("trl.top_k", {"rollout.top_k": top_k})
    t.drop("trl.top_k", "off there and here")


def _batches(t: Translation, is_strided: bool) -> None:
    """Batches count samples there in structured mode, documents in strided mode; always references here."""
    micro, accumulated = int(t.value("micro_batch_size")), int(t.value("gradient_accumulation_steps"))
    samples = 1 if is_strided else t.data["rollout"]["samples_per_prompt"]
    prompts = max(math.ceil(micro * accumulated / samples), 1)
    unit = "documents" if is_strided else f"samples, {samples} a prompt"
    why = f"{micro} x {accumulated} {unit}, on one rank: multiply by the number of GPUs"
    t.take("gradient_accumulation_steps", {"policy.prompts_per_step": prompts}, changed=why)
    own = largest_divisor(prompts, max(micro // samples, 1))
    t.take("micro_batch_size", {"policy.micro_batch_size": own}, changed="" if own == micro else f"in {unit} there")


def _optimizer(t: Translation) -> None:
    name = str(t.value("lr_scheduler"))
    if name in _SCHEDULES:
        t.take("lr_scheduler", {"optimizer.schedule": _SCHEDULES[name]})
    t.drop("lr_scheduler", f"{name} is not offered: optimizer.schedule stays constant")
    optimizer = str(t.value("optimizer") or "adamw")
    t.drop("optimizer", "always AdamW here" if "adamw" in optimizer else f"{optimizer} is not offered: AdamW is used")
    if "adam_beta1" in t or "adam_beta2" in t:
        betas = [t.value("adam_beta1") or 0.9, t.value("adam_beta2") or 0.999]
        for key in ("adam_beta1", "adam_beta2"):
            t.take(key, {"optimizer.betas": betas})
    stage = re.search(r"zero([0-3])", str(t.value("deepspeed") or ""))
    if stage is not None:
        t.take("deepspeed", {"deepspeed.zero_stage": int(stage.group(1))}, changed="read from the file's name")
    t.drop("deepspeed", "set deepspeed.zero_stage")
    for key in ("fsdp", "fsdp_config", "fsdp_version"):
        t.drop(key, "DeepSpeed shards here (deepspeed.zero_stage)")
    if "gradient_checkpointing" in t:
        t.take("gradient_checkpointing", {"policy.gradient_checkpointing": bool(t.value("gradient_checkpointing"))})
    for key, dtype in {"bf16": "bfloat16", "fp16": "float16"}.items():
        if t.value(key) in (True, "auto", "true"):
            t.take(key, {"model.dtype": dtype})
        t.drop(key, "off there")


def _adapters(t: Translation) -> None:
    if t.value("adapter") != "lora":
        adapter = t.value("adapter")
        t.drop("adapter", f"{adapter} is not offered: all weights train unless lora.rank is set")
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"):
            t.drop(key, "not used there without adapter: lora")
        return
    t.take("adapter", {"lora.rank": t.value("lora_r") or 8})
    t.take("lora_r", {"lora.rank": t.value("lora_r") or 8})
    for key, path in {"lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout"}.items():
        if t.value(key) is not None:
            t.take(key, {path: t.value(key)})
    modules = t.value("lora_target_modules")
    if isinstance(modules, list):
        t.take("lora_target_modules", {"lora.targets": modules})
    elif t.value("lora_target_linear"):
        t.take("lora_target_linear", {"lora.targets": ["all-linear"]})
    t.drop("lora_target_modules", "a pattern over module names: list the names in lora.targets")
    t.drop("lora_target_linear", "lora_target_modules comes first")


def _engine(t: Translation, is_strided: bool) -> None:
    if is_strided:
        t.keep("rollout.engine", "auto")
        t.drop("trl.use_vllm", "strided mode samples without it there; rollout.engine decides here")
    elif "trl.use_vllm" in t:
        t.take("trl.use_vllm", {"rollout.engine": "vllm" if t.value("trl.use_vllm") else "transformers"})
