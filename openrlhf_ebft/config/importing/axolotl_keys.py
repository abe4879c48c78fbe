"""Keys of Axolotl's configuration with `rl: ebft` that need no decision: their defaults, those with the same meaning
here, and those that nothing here reads. Keys as paths."""

from __future__ import annotations

from typing import Any

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
STRIDED_DEFAULTS: dict[str, Any] = {"ebft.n_samples_per_prompt": 4, "ebft.temperature": 0.6}
STRUCTURED_DEFAULTS: dict[str, Any] = {
    "trl.scale_rewards": True,
    "trl.num_generations": 8,
    "trl.max_completion_length": 256,
    "trl.temperature": 1.0,
    "trl.loss_type": "dapo",
}

SAME = {
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
SAME_STRIDED = {
    "ebft.stride": "data.stride",
    "ebft.context_length": "data.context_length",
    "ebft.generate_max_len": "data.generate_max_len",
    "ebft.n_samples_per_prompt": "rollout.samples_per_prompt",
    "ebft.temperature": "rollout.temperature",
    "ebft.top_p": "rollout.top_p",
    "ebft.min_completion_prefix": "data.min_completion_prefix",
    "sequence_len": "data.sequence_length",
}
SAME_STRUCTURED = {
    "trl.num_generations": "rollout.samples_per_prompt",
    "trl.max_completion_length": "rollout.max_new_tokens",
    "trl.temperature": "rollout.temperature",
    "trl.top_p": "rollout.top_p",
    "trl.beta": "policy.kl_coef",
    "trl.num_iterations": "policy.updates_per_batch",
}
# Reason: keys.
_DROPPED_FOR: dict[str, str] = {
    "how a pass is computed is decided here (model.attention)": "flash_attention sdp_attention flex_attention "
    "attn_implementation xformers_attention torch_compile gradient_checkpointing_kwargs sample_packing "
    "pad_to_sequence_len tf32 torch_dtype plugins cut_cross_entropy liger_rope liger_rms_norm liger_layer_norm "
    "liger_glu_activation liger_fused_linear_cross_entropy group_by_length eval_batch_size",
    "engines are actors of the run: there is no server to reach": "trl.vllm_server_host trl.vllm_server_port "
    "trl.vllm_server_timeout trl.vllm_mode vllm.host vllm.port vllm.serve_module trl.vllm_lora_sync "
    "trl.vllm_sync_interval",
    "always energy-based fine-tuning here": "rl",
    "special tokens are the tokenizer's; a missing pad token becomes EOS, masked out": "special_tokens",
    "the tokenizer's template is used; another one is a file (data.chat_template)": "chat_template chat_template_jinja",
    "every step is recorded": "logging_steps",
    "counted in steps here: checkpoint.every_steps, evaluation.every_steps": "saves_per_epoch evals_per_epoch "
    "save_strategy eval_strategy",
    "openrlhf-ebft train --resume goes on from a checkpoint": "resume_from_checkpoint auto_resume_from_checkpoints "
    "lora_model_dir",
    "held-out rows are a share of the data (data.heldout_fraction)": "test_datasets",
    "the loss lies in completions and ground truths": "train_on_inputs",
    "the run's name is used": "wandb_name wandb_run_id",
    "set WANDB_ENTITY": "wandb_entity",
    "wandb is used when logging.wandb_project is set": "use_wandb wandb_mode wandb_watch wandb_log_model",
    "a step samples with the weights of its beginning": "trl.async_prefetch",
    "stop tokens are the tokenizer's and those of the model's generation config": "trl.generation_kwargs",
    "not offered: write them into a template (data.chat_template)": "trl.chat_template_kwargs",
    "the reference model stays as it is": "trl.sync_ref_model",
    "samples are in the run's report": "trl.log_completions",
    "data is prepared in seconds, not kept": "dataset_prepared_path dataset_processes dataloader_num_workers "
    "dataloader_pin_memory dataloader_prefetch_factor",
    "rows are shuffled by the seed": "shuffle_merged_datasets",
    "found by transformers": "tokenizer_type model_type tokenizer_use_fast",
    "unknown keys are always errors here": "strict",
    "adapters are trained on unquantised weights here": "load_in_8bit load_in_4bit",
    "not offered: adapters are plain LoRA on linear layers": "peft_use_dora peft_use_rslora lora_modules_to_save",
    "not offered: a run ends at policy.max_steps or policy.epochs": "early_stopping_patience "
    "loss_watchdog_threshold loss_watchdog_patience",
    "nothing is uploaded": "hub_model_id hub_strategy push_dataset_to_hub hf_use_auth_token",
    "see section checkpoint; the final model is always exported": "save_safetensors save_only_model",
}
DROPPED = {key: why for why, keys in _DROPPED_FOR.items() for key in keys.split()}
AGGREGATIONS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "dr_grpo"}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}

NEEDED = {"model.path": "base_model", "data.path": "datasets"}
"""Our keys that have no default, with the key there that gives each."""
