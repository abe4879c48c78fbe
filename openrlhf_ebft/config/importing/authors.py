"""A configuration of the EBFT authors' trainer: flat keys, each with a decision what it becomes here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf_ebft.config.importing.authors_keys import DEFAULTS, DROPPED, RESOURCES, SAME
from openrlhf_ebft.config.importing.translation import Translation, WrongValue, largest_divisor, safe_name

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
    for key, path in {"save_steps": "checkpoint.every_steps", "eval_steps": "evaluation.every_steps"}.items():
        if t.value(key) is not None:
            steps = t.whole(key)
            t.take(key, {path: max(steps, 0)}, changed="-1 is 0 here" if steps < 0 else "")
        t.drop(key, "null there: the default is used here")
    if t.value("eval_max_samples") is not None:
        t.take("eval_max_samples", {"evaluation.max_examples": min(t.whole("eval_max_samples"), 10**6)})
    t.drop("eval_max_samples", "null there: the default is used here")


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
        t.take("document_masking", {"data.pack_documents": t.flag("document_masking")}, changed=why)
    masked = t.flag("qa_masking")
    why = "" if masked else "false there trains on questions too; here anchors and loss lie in answers. Raw text: "
    t.drop("qa_masking", why + ("" if masked else "set data.text_column") or "always so here")
    everything = t.value("max_samples") is None or t.number("max_samples") < 0
    t.drop("max_samples", "all rows are used" if everything else "no such limit: cut the file, or set policy.max_steps")


def _features(t: Translation) -> None:
    whitening = "sample" if t.flag("use_whitening") else "none"
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
    samples = t.whole("n_samples_per_prompt", least=1)
    rollout, train = t.whole("rollout_batch_size", least=1), t.whole("train_batch_size", least=1)
    step = max(train // samples, 1)
    parts = rollout // step if rollout > step and rollout % step == 0 else 1
    prompts = step * parts
    passes = t.whole("max_epochs", least=1)
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
    ranks, together = _ranks(t), t.whole("micro_train_batch_size", least=1)
    micro = largest_divisor(max(prompts // (ranks * parts), 1), together // samples)
    why = f"{together} samples there; references with {samples} samples each here"
    t.take("micro_train_batch_size", {"policy.micro_batch_size": micro}, changed=why)


def _ranks(t: Translation) -> int:
    """Ranks of the trainer: what there is, cut down to what the batch divides into."""
    wanted = t.whole("actor_num_nodes", least=1) * t.whole("actor_num_gpus_per_node", least=1)
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
        clips = t.value("eps_clip_low_high") or [t.value("eps_clip") or 0.2] * 2
        if not isinstance(clips, list) or len(clips) != 2:
            raise WrongValue("eps_clip_low_high", clips, "a list of two numbers")
        low, high = clips
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
    coefficient = t.number("init_kl_coef")
    in_loss = t.flag("use_kl_loss")
    why = "" if in_loss or coefficient == 0 else "a term of the loss here, a part of the reward there"
    t.take("init_kl_coef", {"policy.kl_coef": coefficient}, changed=why)
    t.drop("use_kl_loss", "KL is always a term of the loss here")
    if coefficient > 0:
        t.take("kl_estimator", {"policy.kl_estimator": t.value("kl_estimator")})
    t.drop("kl_estimator", "no KL term: init_kl_coef is 0")
    if t.flag("enable_ema"):
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
    replicas = t.whole("critic_num_nodes", least=1) * t.whole("critic_num_gpus_per_node", least=1)
    t.take("critic_num_gpus_per_node", {"features.num_replicas": replicas}, changed="nodes times GPUs of each")
    t.drop("critic_num_nodes", "nodes times GPUs of each are features.num_replicas")
    if t.data["policy"]["kl_coef"] > 0 and "ref_num_gpus_per_node" in t:
        count = (t.whole("ref_num_nodes") or 1) * t.whole("ref_num_gpus_per_node", least=1)
        t.take("ref_num_gpus_per_node", {"reference.num_replicas": count}, changed="nodes times GPUs of each")
    for key in ("ref_num_nodes", "ref_num_gpus_per_node"):
        t.drop(key, "no KL term: no reference model is started" if t.data["policy"]["kl_coef"] == 0 else RESOURCES)
    if t.value("vllm_num_engines"):
        t.take("vllm_num_engines", {"rollout.num_engines": t.value("vllm_num_engines")})
    t.drop("vllm_num_engines", "short windows are sampled by the block-parallel engine (rollout.engine)")
    if t.flag("colocate_all_models"):
        t.take("colocate_all_models", {"placement.share_gpus": "always"})
    t.drop("colocate_all_models", "roles share GPUs when there are too few (placement.share_gpus: auto)")
