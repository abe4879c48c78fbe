"""A configuration of the EBFT authors' trainer: flat keys, each with a decision what it becomes here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf_ebft.config.importing.authors_keys import DEFAULTS, DROPPED, RESOURCES, SAME
from openrlhf_ebft.config.importing.translation import Translation, largest_divisor, safe_name

_SCHEDULES = {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
_POOLING = {"last_token": "last_token", "mean_pooling": "completion_mean", "concat": "concat_tokens"}
_ESTIMATORS = {"rloo": "rloo", "group_norm": "group_norm", "dr_grpo": "dr_grpo", "reinforce": "reinforce"}


def translate(source: Mapping[str, Any]) -> Translation:
    """Translates one configuration without its sweep."""
    t = Translation(source, DEFAULTS)
    t.keep("data.mode", "strided")
    t.keep("rollout.engine", "auto")
    t.map_simple(SAME)
    _name(t)
    _data(t)
    _features(t)
    _batches(t)
    _loss(t)
    _schedule(t)
    _layout(t)
    t.drop_all(DROPPED)
    t.finish("not known: nothing here reads it")
    return t


def _name(t: Translation) -> None:
    path = str(t.value("save_path") or "ebft")
    t.keep("name", safe_name(path.rstrip("/").rsplit("/", 1)[-1]))
    t.drop("save_path", f"its last part is the run's name, {t.data['name']}; runs lie under logging.root")
    project = t.value("wandb_project")
    if project is not None and "<" not in str(project):
        t.take("wandb_project", {"logging.wandb_project": project})
    t.drop("wandb_project", "a placeholder")
    if "save_steps" in t:
        steps = int(t.value("save_steps"))
        t.take("save_steps", {"checkpoint.every_steps": max(steps, 0)}, changed="-1 is 0 here" if steps < 0 else "")
    if "eval_steps" in t:
        steps = int(t.value("eval_steps"))
        t.take("eval_steps", {"evaluation.every_steps": max(steps, 0)}, changed="-1 is 0 here" if steps < 0 else "")
    if "eval_max_samples" in t:
        t.take("eval_max_samples", {"evaluation.max_examples": min(int(t.value("eval_max_samples")), 10**6)})


def _data(t: Translation) -> None:
    answer = "label_key" if t.value("label_key") else "output_key"
    if t.value(answer):
        t.take(answer, {"data.ground_truth_column": t.value(answer)})
    t.drop("label_key", "null there: the default is used here")
    t.drop("output_key", "the ground truth comes from label_key")
    t.take(
        "prompt_max_len",
        {"data.sequence_length": t.value("prompt_max_len")},
        changed="counts question and answer there and here; longer rows are cut",
    )
    stride = t.value("stride") or t.value("generate_max_len")
    t.take("stride", {"data.stride": stride})
    if "document_masking" in t:
        why = "documents are packed and masked apart, or not packed at all"
        t.take("document_masking", {"data.pack_documents": bool(t.value("document_masking"))}, changed=why)
    masked = bool(t.value("qa_masking"))
    why = "" if masked else "false there trains on questions too; here anchors and loss lie in answers. Raw text: "
    t.drop("qa_masking", why + ("" if masked else "set data.text_column") or "always so here")
    samples = t.value("max_samples")
    everything = samples is None or float(samples) < 0
    t.drop("max_samples", "all rows are used" if everything else "no such limit: cut the file, or set policy.max_steps")


def _features(t: Translation) -> None:
    whitening = "sample" if t.value("use_whitening") else "none"
    why = (
        "whitening there is in sample space; the paper's is feature (docs/conventions.md)"
        if whitening == "sample"
        else ""
    )
    t.take("use_whitening", {"features.whitening": whitening}, changed=why)
    method = str(t.value("hidden_state_method"))
    if method in ("concat", "stack"):
        normalize = "joint" if method == "concat" else "per_layer"
        t.take(
            "hidden_state_method",
            {"features.layer_fractions": [0.25, 0.5, 0.75], "features.normalize": normalize},
        )
    elif method == "last_only":
        t.take("hidden_state_method", {"features.layer_fractions": [1.0], "features.normalize": "joint"})
    else:
        t.drop(
            "hidden_state_method",
            f"{method} depends on the model's number of blocks: give depths as fractions (features.layer_fractions)",
        )
    pooling = str(t.value("embed_method"))
    if pooling in _POOLING:
        ours = _POOLING[pooling]
        why = "" if ours == pooling else "another name for the same pooling of a window (docs/conventions.md)"
        t.take("embed_method", {"features.embed_method": ours}, changed=why)
    t.drop("embed_method", f"{pooling} gives rewards for single tokens: not offered, the default pooling is used")


def _batches(t: Translation) -> None:
    """Batches count samples there and references, with all their samples, here."""
    samples = int(t.value("n_samples_per_prompt"))
    rollout, train = int(t.value("rollout_batch_size")), int(t.value("train_batch_size"))
    step = max(train // samples, 1)
    parts = rollout // step if rollout > step and rollout % step == 0 else 1
    prompts = step * parts
    passes = int(t.value("max_epochs"))
    t.take(
        "train_batch_size",
        {"policy.prompts_per_step": prompts},
        changed=f"{train} samples of {samples} a prompt are {step} prompts an update"
        + (f", {parts} updates a batch" if parts > 1 else ""),
    )
    if prompts == rollout:
        t.take("rollout_batch_size", {"policy.prompts_per_step": prompts})
    else:
        t.take(
            "rollout_batch_size",
            {"policy.prompts_per_step": prompts},
            changed=f"a step samples all the {prompts} prompts of its updates at once, not {rollout}",
        )
    updates = parts * passes
    t.take("max_epochs", {"policy.mini_batches": parts, "policy.updates_per_batch": updates})
    ranks = _ranks(t)
    micro = largest_divisor(max(prompts // (ranks * parts), 1), int(t.value("micro_train_batch_size")) // samples)
    why = f"{t.value('micro_train_batch_size')} samples there; references with {samples} samples each here"
    t.take("micro_train_batch_size", {"policy.micro_batch_size": micro}, changed=why)


def _ranks(t: Translation) -> int:
    """Ranks of the trainer: what there is, cut down to what the batch divides into."""
    wanted = int(t.value("actor_num_nodes")) * int(t.value("actor_num_gpus_per_node"))
    prompts = t.data["policy"]["prompts_per_step"] // t.data["policy"]["mini_batches"]
    ranks = largest_divisor(prompts, wanted)
    why = "" if ranks == wanted else f"{prompts} prompts an update do not divide into {wanted} ranks"
    t.take("actor_num_gpus_per_node", {"policy.num_ranks": ranks}, changed=why or "nodes times GPUs of each")
    t.drop("actor_num_nodes", "nodes times GPUs of each are policy.num_ranks")
    return ranks


def _loss(t: Translation) -> None:
    updates = t.data["policy"]["updates_per_batch"]
    kind = str(t.value("policy_loss_type") or "ppo")
    loss = "gspo" if kind == "gspo" else "ppo" if updates > 1 else "reinforce"
    why = "one update a batch: every ratio is 1 and clipping does nothing" if loss == "reinforce" else ""
    if "policy_loss_type" in t or loss != "reinforce":
        t.take("policy_loss_type", {"policy.loss": loss}, changed=why)
    if loss == "reinforce":
        t.drop("eps_clip", "one update a batch: nothing is clipped")
        t.drop("eps_clip_low_high", "one update a batch: nothing is clipped")
        t.drop("dual_clip", "one update a batch: nothing is clipped")
    else:
        low, high = t.value("eps_clip_low_high") or [t.value("eps_clip") or 0.2] * 2
        for key in ("eps_clip_low_high", "eps_clip"):
            if key in t:
                t.take(key, {"policy.clip_low": low, "policy.clip_high": high})
        t.map_simple({"dual_clip": "policy.dual_clip"})
    estimator = str(t.value("advantage_estimator"))
    if estimator in _ESTIMATORS:
        t.take("advantage_estimator", {"reward.advantage": _ESTIMATORS[estimator]})
    elif estimator == "reinforce_baseline":
        t.take(
            "advantage_estimator", {"reward.advantage": "rloo_simple"}, changed="the mean of the siblings is left out"
        )
    else:
        t.drop("advantage_estimator", f"{estimator} needs a trained critic: rloo, the paper's, is used")
    coefficient = float(t.value("init_kl_coef") or 0.0)
    in_loss = bool(t.value("use_kl_loss"))
    why = "" if in_loss or coefficient == 0 else "a term of the loss here, a part of the reward there"
    t.take("init_kl_coef", {"policy.kl_coef": coefficient}, changed=why)
    t.drop("use_kl_loss", "KL is always a term of the loss here")
    if coefficient > 0:
        t.take("kl_estimator", {"policy.kl_estimator": t.value("kl_estimator")})
    t.drop("kl_estimator", "no KL term: init_kl_coef is 0")
    if t.value("enable_ema"):
        decay = t.value("ema_beta") or 0.992
        t.take("enable_ema", {"policy.export_ema": True})
        t.take("ema_beta", {"policy.ema_decay": decay})
    t.drop("enable_ema", "no average: policy.ema_decay is left out")
    t.drop("ema_beta", "no average is kept there without enable_ema")
    if "target_modules" in t:
        t.take("target_modules", {"lora.targets": t.value("target_modules")})


def _schedule(t: Translation) -> None:
    name = str(t.value("lr_scheduler"))
    if name == "cosine_with_min_lr":
        t.take("lr_scheduler", {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1})
    elif name in _SCHEDULES:
        t.take("lr_scheduler", {"optimizer.schedule": _SCHEDULES[name]})
    else:
        t.drop("lr_scheduler", f"{name} is not offered: optimizer.schedule stays constant")
    if t.value("actor_lr_warmup_ratio") is not None:
        t.take("actor_lr_warmup_ratio", {"optimizer.warmup_ratio": t.value("actor_lr_warmup_ratio")})
        t.drop("lr_warmup_ratio", "actor_lr_warmup_ratio comes first")
    else:
        t.take("lr_warmup_ratio", {"optimizer.warmup_ratio": t.value("lr_warmup_ratio")})
        t.drop("actor_lr_warmup_ratio", "null there: lr_warmup_ratio is used")


def _layout(t: Translation) -> None:
    replicas = int(t.value("critic_num_nodes")) * int(t.value("critic_num_gpus_per_node"))
    t.take("critic_num_gpus_per_node", {"features.num_replicas": replicas}, changed="nodes times GPUs of each")
    t.drop("critic_num_nodes", "nodes times GPUs of each are features.num_replicas")
    if t.data["policy"]["kl_coef"] > 0 and "ref_num_gpus_per_node" in t:
        count = int(t.value("ref_num_nodes") or 1) * int(t.value("ref_num_gpus_per_node"))
        t.take("ref_num_gpus_per_node", {"reference.num_replicas": count}, changed="nodes times GPUs of each")
    for key in ("ref_num_nodes", "ref_num_gpus_per_node"):
        t.drop(key, "no KL term: no reference model is started" if t.data["policy"]["kl_coef"] == 0 else RESOURCES)
    if t.value("vllm_num_engines"):
        t.take("vllm_num_engines", {"rollout.num_engines": t.value("vllm_num_engines")})
    t.drop("vllm_num_engines", "short windows are sampled by the block-parallel engine (rollout.engine)")
    if t.value("colocate_all_models"):
        t.take("colocate_all_models", {"placement.share_gpus": "always"})
    t.drop("colocate_all_models", "roles share GPUs when there are too few (placement.share_gpus: auto)")
