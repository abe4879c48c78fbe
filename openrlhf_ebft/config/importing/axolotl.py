"""Axolotl's configuration with `rl: ebft`: the sections `ebft`, `trl`, `vllm` and the keys around them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from openrlhf_ebft.config.importing.axolotl_keys import (
    AGGREGATIONS,
    DEFAULTS,
    DROPPED,
    SAME,
    SAME_STRIDED,
    SAME_STRUCTURED,
    SCHEDULES,
    STRIDED_DEFAULTS,
    STRUCTURED_DEFAULTS,
)
from openrlhf_ebft.config.importing.translation import Translation, WrongValue, largest_divisor, safe_name


def translate(nested: Mapping[str, Any]) -> Translation:
    """Translates one configuration."""
    flat = dict(_flatten(nested))
    is_strided = flat.get("ebft.mode", "structured") == "strided"
    t = Translation(flat, DEFAULTS | (STRIDED_DEFAULTS if is_strided else STRUCTURED_DEFAULTS))
    t.take("ebft.mode", {"data.mode": "strided" if is_strided else "structured"})
    t.map_simple(SAME | (SAME_STRIDED if is_strided else SAME_STRUCTURED))
    _name_and_data(t, is_strided)
    _features(t, is_strided)
    _loss(t, is_strided)
    _batches(t, is_strided)
    _optimizer(t)
    _adapters(t)
    _engine(t, is_strided)
    t.drop_all(DROPPED)
    for key in (*SAME_STRIDED, *SAME_STRUCTURED):
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
    if not isinstance(datasets, list):
        raise WrongValue("datasets", datasets, "a list of data sets such as [{path: data.jsonl}]")
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
    share = t.number("val_set_size")
    held_out = {"data.heldout_fraction": share} if 0 < share < 1 else {}
    if held_out:
        t.take("val_set_size", held_out)
    elif share == 0:
        why = "no validation rows: no held-out evaluation"
        t.take("val_set_size", {"data.heldout_fraction": 0.0, "evaluation.max_examples": 0}, changed=why)
    t.drop("val_set_size", "a count of rows there: the default share is held out (data.heldout_fraction)")
    if "sequence_len" in t and not is_strided:
        limit = t.whole("sequence_len", least=1)
        t.take("sequence_len", {"data.max_prompt_tokens": limit}, changed="limits the prompt alone here")


def _features(t: Translation, is_strided: bool) -> None:
    t.take("ebft.use_whitening", {"features.whitening": "feature" if t.flag("ebft.use_whitening") else "none"})
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
    if "ebft.adaptive_max_tokens" in t and not t.flag("ebft.adaptive_max_tokens"):
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
    scaled = t.flag("trl.scale_rewards")
    why = "minus the group's mean" + (", over its standard deviation" if scaled else "")
    t.take("trl.scale_rewards", {"reward.advantage": "group_norm" if scaled else "dr_grpo"}, changed=why)
    kind = str(t.value("trl.loss_type"))
    if kind in AGGREGATIONS:
        t.take("trl.loss_type", {"policy.aggregation": AGGREGATIONS[kind]})
    t.drop("trl.loss_type", f"{kind} is not offered: policy.aggregation keeps its default")
    if t.whole("trl.num_iterations") > 1:
        low = t.value("trl.epsilon") or 0.2
        t.keep("policy.loss", "ppo")
        t.take("trl.epsilon", {"policy.clip_low": low, "policy.clip_high": t.value("trl.epsilon_high") or low})
        t.drop("trl.epsilon_high", "see policy.clip_high")
    t.drop("trl.epsilon", "one update a batch: every ratio is 1 and nothing is clipped")
    t.drop("trl.epsilon_high", "one update a batch: nothing is clipped")
    if t.whole("trl.top_k") > 0:
        t.take("trl.top_k", {"rollout.top_k": t.whole("trl.top_k")})
    t.drop("trl.top_k", "off there and here")


def _batches(t: Translation, is_strided: bool) -> None:
    """Batches count samples there in structured mode, documents in strided mode; always references here."""
    micro, accumulated = (t.whole(key, least=1) for key in ("micro_batch_size", "gradient_accumulation_steps"))
    samples = 1 if is_strided else t.data["rollout"]["samples_per_prompt"]
    prompts = max(math.ceil(micro * accumulated / samples), 1)
    unit = "documents" if is_strided else f"samples, {samples} a prompt"
    why = f"{micro} x {accumulated} {unit}, on one rank: multiply by the number of GPUs"
    t.take("gradient_accumulation_steps", {"policy.prompts_per_step": prompts}, changed=why)
    own = largest_divisor(prompts, max(micro // samples, 1))
    t.take("micro_batch_size", {"policy.micro_batch_size": own}, changed="" if own == micro else f"in {unit} there")


def _optimizer(t: Translation) -> None:
    name = str(t.value("lr_scheduler"))
    if name in SCHEDULES:
        t.take("lr_scheduler", {"optimizer.schedule": SCHEDULES[name]})
    if name == "cosine":
        t.map_simple({"cosine_min_lr_ratio": "optimizer.min_lr_ratio"})
    t.drop("cosine_min_lr_ratio", "read only with a cosine schedule")
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
        is_on = str(t.value("gradient_checkpointing")).startswith("offload") or t.flag("gradient_checkpointing")
        t.take("gradient_checkpointing", {"policy.gradient_checkpointing": is_on})
    for key, dtype in {"bf16": "bfloat16", "fp16": "float16"}.items():
        if t.value(key) in ("auto", "full") or t.flag(key):
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
    elif t.flag("lora_target_linear"):
        t.take("lora_target_linear", {"lora.targets": ["all-linear"]})
    t.drop("lora_target_modules", "a pattern over module names: list the names in lora.targets")
    t.drop("lora_target_linear", "lora_target_modules comes first")


def _engine(t: Translation, is_strided: bool) -> None:
    if is_strided:
        t.keep("rollout.engine", "auto")
        t.drop("trl.use_vllm", "strided mode samples without it there; rollout.engine decides here")
    elif "trl.use_vllm" in t:
        t.take("trl.use_vllm", {"rollout.engine": "vllm" if t.flag("trl.use_vllm") else "transformers"})
