"""Keys of the EBFT authors' trainer (built on OpenRLHF 0.8) that need no decision: their defaults, those with the same
meaning here, and those that nothing here reads. Names and defaults are facts of its command line."""

from __future__ import annotations

from typing import Any

MARKS = frozenset({"pretrain", "n_samples_per_prompt", "context_max_len", "actor_learning_rate", "hidden_state_method"})
"""Keys by which such a file is known."""

LIST_KEYS = frozenset(
    {"adam_betas", "eps_clip_low_high", "target_modules", "reward_clip_range", "dynamic_filtering_reward_range"}
)
"""Keys whose value is a list; any other list is a sweep."""

# Defaults there that differ from ours, or that decide what a translated key means.
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "n_samples_per_prompt": 1,
    "ce_loss_coef": 0.01,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "seed": 42,
    "use_whitening": False,
    "hidden_state_method": "last_only",
    "embed_method": "concat",
    "advantage_estimator": "gae",
    "generate_max_len": 1024,
    "context_max_len": 1024,
    "prompt_max_len": 1024,
    "train_batch_size": 128,
    "rollout_batch_size": 1024,
    "micro_train_batch_size": 4,
    "max_epochs": 1,
    "zero_stage": 2,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "critic_num_nodes": 1,
    "critic_num_gpus_per_node": 8,
}

SAME = {
    "pretrain": "model.path",
    "critic_pretrain": "features.path",
    "input_key": "data.prompt_column",
    "prompt_data": "data.path",
    "prompt_split": "data.split",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "seed": "seed",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "context_max_len": "data.context_length",
    "generate_max_len": "data.generate_max_len",
    "alignment_rew_coef": "reward.alignment_coef",
    "diversity_rew_coef": "reward.diversity_coef",
    "ce_loss_coef": "policy.ce_coef",
    "rl_loss_coef": "policy.rl_coef",
    "entropy_loss_coef": "policy.entropy_coef",
    "actor_learning_rate": "optimizer.learning_rate",
    "adam_betas": "optimizer.betas",
    "max_norm": "optimizer.max_grad_norm",
    "l2": "optimizer.weight_decay",
    "num_episodes": "policy.epochs",
    "zero_stage": "deepspeed.zero_stage",
    "adam_offload": "deepspeed.offload_optimizer",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "max_ckpt_num": "checkpoint.keep_last",
    "apply_chat_template": "data.apply_chat_template",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
}

_FROZEN = "the feature network is frozen, as in the paper: no critic is trained"
RESOURCES = "resources follow from the counts of the roles (sections policy, rollout, features, placement)"

# Reason: keys.
_DROPPED_FOR: dict[str, str] = {
    _FROZEN: "critic_classifier_loss_coef critic_sequence_level classifier_sequence_selection critic_learning_rate "
    "critic_lr_head critic_lr_scheduler critic_lr_warmup_ratio save_value_network load_critic_checkpoint value_clip "
    "lambd gamma value_head_prefix",
    RESOURCES: "reward_num_nodes reward_num_gpus_per_node colocate_reward_models colocate_actor_ref "
    "colocate_critic_reward ref_reward_offload",
    "held-out rows are a share of the data (data.heldout_fraction)": "eval_dataset eval_split",
    "an evaluation samples as training does (section rollout), on rows held out of the data": "eval_generate_max_len "
    "eval_temperature eval_n_samples_per_prompt eval_batch_size",
    "downstream tasks run with each evaluation: name them in evaluation.tasks": "eval_down_steps eval_down_max_samples "
    "eval_down_batch_size eval_n_samples_per_prompt_down eval_temperature_down",
    "engines and feature networks fill a budget of tokens": "micro_rollout_batch_size micro_reward_batch_size "
    "vllm_generate_batch_size",
    "rollout.weight_transfer and rollout.sleep say how weights travel and engines sleep": "vllm_sync_backend "
    "vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep",
    "always so here, and emptied when weights change": "enable_prefix_caching",
    "a sequence is not split over GPUs": "ring_attn_size ring_head_stride ds_tensor_parallel_size",
    "ranks are actors of Ray": "local_rank",
    "found by transformers": "disable_fast_tokenizer",
    "docs/architecture.md says what makes a run repeat": "full_determinism",
    "no router loss is added": "aux_loss_coef",
    "one data set: put the files into one folder": "prompt_data_probs",
    "not offered: write it into the rows, or into a template (data.chat_template)": "input_template",
    "set WANDB_ENTITY": "wandb_org",
    "lies in the run's directory (logging.tensorboard)": "use_tensorboard",
    "how a pass is computed is decided here (model.attention, policy.max_tokens_per_micro_batch)": "flash_attn "
    "packing_samples use_liger_kernel deepcompile overlap_comm use_dynamic_batch train_max_tokens_per_gpu "
    "rollout_max_tokens_per_gpu grad_accum_dtype zpg gradient_checkpointing_use_reentrant",
    "always so here (model.dtype is bfloat16)": "bf16",
    "always so here: the cross-entropy covers all supervised tokens": "pretrain_mode",
    "see section checkpoint; the final model is always exported": "save_log_scale_count save_even_count ckpt_path "
    "disable_ds_ckpt save_hf_ckpt load_actor_checkpoint use_ds_universal_ckpt max_ckpt_mem",
    "no reward model is needed; COMET is evaluation.comet_model, other functions reward.function": "reward_pretrain "
    "remote_rm_url agent_func_path",
    "holds an API key: log in with wandb itself": "use_wandb",
    "the run's name is used": "wandb_run_name wandb_group slurm_job",
    "every step is recorded": "logging_steps log_gradients",
    "no such mode": "debug async_train use_ms",
    "prompts are used as they are unless data.apply_chat_template is true": "no_chat_template",
    "adapters are trained on unquantised weights here": "load_in_4bit",
    "rewards are not changed; reward.advantage = group_norm scales by the group's spread": "normalize_reward "
    "reward_clip_range no_advantage_std_norm dynamic_filtering dynamic_filtering_reward_range overlong_buffer_len "
    "overlong_penalty_factor",
    "coefficients stay the same for the whole run": "ce_loss_decay_steps kl_loss_decay_steps rl_loss_warmup_start "
    "rl_loss_warmup_steps kl_loss_coef",
}
DROPPED = {key: why for why, keys in _DROPPED_FOR.items() for key in keys.split()}

NEEDED = {"model.path": "pretrain", "data.path": "prompt_data"}
"""Our keys that have no default, with the key there that gives each."""
