"""The sections of a run's configuration: every knob with its unit, default and range, written once."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from openrlhf_ebft.config.durability import CheckpointConfig, RecoveryConfig
from openrlhf_ebft.config.evaluation import EvaluationConfig
from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.config.section import EmbedMethod, Fraction, Precision, Section
from openrlhf_ebft.config.training_sections import DeepSpeedConfig, OptimizerConfig, PolicyConfig, ReferenceConfig


class ModelConfig(Section):
    """The policy's starting point."""

    path: str = Field(min_length=1, description="local folder, hub name, or a .gguf file of the initial policy")
    dtype: Precision = Field("bfloat16", description="precision of forward and backward passes of the policy")
    attention: Literal["sdpa", "eager", "rows", "split", "flex"] = Field(
        "sdpa",
        description="how tree attention runs: sdpa and eager with one mask over the whole tree; split without one, for "
        "many anchors; flex by block masks, on GPUs; rows runs each branch as its own causal sequence",
    )
    tokenizer: str | None = Field(None, description="tokenizer folder or hub name; default: that of model.path")
    trust_remote_code: bool = Field(False, description="run Python code shipped inside the model's repository")


class DataConfig(Section):
    """Where prompts and ground truths come from and how they become token ids."""

    mode: Literal["structured", "strided"] = Field(
        "structured",
        description="structured: one anchor at the end of each prompt; strided: anchors all along documents or answers",
    )
    path: str = Field(
        min_length=1,
        description="file (.jsonl .json .csv .parquet), folder of such files, or hub dataset name; with "
        "data.text_column also text files (.txt .md .rst .py) or a folder that holds some",
    )
    split: str = Field("train", description="split of a hub dataset; ignored for files")
    prompt_column: str = Field("prompt", description="column with the prompt text")
    ground_truth_column: str = Field("ground_truth", description="column with the ground-truth completion text")
    messages_column: str | None = Field(
        None, description="column with chat messages; assistant turns are the ground truths (data.turns)"
    )
    turns: Literal["last", "all"] = Field(
        "last",
        description="which assistant turns of a chat are ground truths: the last one, or all, each with its own anchor",
    )
    history: Literal["ground_truth", "own"] = Field(
        "ground_truth",
        description="what later turns of a chat stand behind: the turns of the data, all sampled at once, or the "
        "policy's own answers, sampled turn after turn",
    )
    apply_chat_template: bool = Field(False, description="wrap plain prompts as a user turn of the chat template")
    chat_template: str | None = Field(None, description="file with a Jinja chat template that replaces the tokenizer's")
    append_eos: bool = Field(
        True, description="end every ground truth with EOS, a chat with the end of turn of its template"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="limit of a prompt, in tokens")
    over_long_prompt: Literal["skip", "error", "truncate_left"] = Field(
        "skip", description="what happens to prompts above data.max_prompt_tokens"
    )
    min_ground_truth_tokens: int = Field(1, ge=1, description="shorter ground truths are skipped, in tokens")
    max_ground_truth_tokens: int = Field(1024, ge=1, description="longer ground truths are skipped, in tokens")
    on_bad_row: Literal["strict", "skip"] = Field(
        "strict", description="strict: the first faulty row is an error; skip: faulty rows are counted and left out"
    )
    text_column: str | None = Field(
        None, description="strided: column with raw documents; default: anchors lie in the answers of prompts or chats"
    )
    stride: int = Field(8, ge=1, description="strided: tokens between anchors")
    context_length: int = Field(8, ge=1, description="strided: tokens of a document before its first anchor")
    generate_max_len: int = Field(8, ge=1, description="strided: tokens of a window and its completions")
    sequence_length: int = Field(256, ge=2, description="strided: longer documents are cut, in tokens")
    pack_documents: bool = Field(
        False, description="strided: fill references of data.sequence_length with several documents, masked apart"
    )
    min_completion_prefix: int = Field(0, ge=0, description="strided: tokens of an answer before its first anchor")
    heldout_fraction: Fraction = Field(0.05, description="share of rows held out, chosen by a hash of the content")
    shuffle: bool = Field(True, description="new seeded order of the training rows every epoch")


class RolloutConfig(Section):
    """The sampler: which engine, how many, and every sampling field."""

    engine: Literal["vllm", "transformers", "auto"] = Field(
        "vllm",
        description="what samples the completions; auto: transformers in strided mode unless tensor_parallel_size or "
        "weight_transfer need vllm, else vllm",
    )
    num_engines: int = Field(1, ge=1, description="number of rollout engine actors")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine")
    samples_per_prompt: int = Field(4, ge=1, description="completions sampled for each anchor (n)")
    temperature: float = Field(0.6, ge=0.0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus mass; 1 is off")
    top_k: int = Field(0, ge=0, description="candidates kept; 0 is off")
    max_new_tokens: int = Field(256, ge=1, description="limit of a completion, in tokens, whatever the ground truth")
    length_multiplier: float = Field(
        1.5, gt=0.0, description="limit of a completion as a multiple of its ground truth's length"
    )
    min_length_limit: int = Field(8, ge=1, description="no completion's limit is set below this, in tokens")
    max_model_len: int | None = Field(None, ge=2, description="engine's limit of prompt + completion; default: derived")
    kv_cache_gib: float = Field(1.0, gt=0.0, description="key/value cache of one engine on CPU, in GiB")
    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0, description="share of a GPU that vllm may take")
    block_size: int = Field(32, ge=1, description="tokens of one key/value block")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    sleep: bool | None = Field(
        None, description="free an engine's GPU memory between calls (vllm); default: when GPUs are shared"
    )
    sync_every_steps: int = Field(1, ge=1, description="EBFT steps between weight updates of the engines")
    weight_transfer: Literal["auto", "object_store", "nccl", "ipc"] = Field(
        "auto", description="how weights reach the engines; auto: object_store on CPU, nccl on GPU"
    )
    max_retries: int = Field(2, ge=0, description="repeats of a failed generate call before the run stops")
    timeout_s: float = Field(900.0, gt=0.0, description="limit of one generate or weight-update call, in seconds")


class FeatureConfig(Section):
    """The frozen feature network and how its hidden states become one embedding per completion."""

    source: Literal["separate", "policy_base"] = Field(
        "separate",
        description="separate: actors with a model of their own; policy_base: the trainer's own base model with its "
        "adapters switched off (lora.rank), no second copy",
    )
    path: str | None = Field(None, description="feature network's folder or name; default: model.path")
    dtype: Precision | None = Field(None, description="precision of the feature network; default: model.dtype")
    layer_fractions: tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...] = Field(
        (0.25, 0.5, 0.75), min_length=1, description="depths of the tapped blocks as fractions of the model's depth"
    )
    normalize: Literal["joint", "per_layer", "none"] = Field("joint", description="scaling of a token's features")
    embed_method: EmbedMethod | None = Field(
        None,
        description="pooling of token features to an embedding; concat_tokens: all tokens of a window of strided mode; "
        "default: completion_mean, last_token in strided mode",
    )
    pool_special_tokens: bool = Field(False, description="let EOS and other special tokens enter pooling")
    whitening: Literal["feature", "sample", "none"] = Field("feature", description="space in which groups are whitened")
    whiten_tol: float = Field(1e-5, ge=1e-6, lt=1.0, description="singular values below tol * largest count as zero")
    num_replicas: int = Field(1, ge=1, description="number of feature network actors")
    max_tokens_per_batch: int = Field(8192, ge=1, description="tokens of one forward pass of the feature network")
    timeout_s: float = Field(900.0, gt=0.0, description="limit of one feature extraction, in seconds")


class RewardConfig(Section):
    """Alignment minus diversity, a function of your own, and the baseline that turns rewards into advantages."""

    alignment_coef: float = Field(1.0, ge=0.0, description="weight of alignment with the ground truth")
    diversity_coef: float = Field(1.0, ge=0.0, description="weight of the similarity to sibling completions")
    function: str | None = Field(
        None,
        pattern=r".+:[A-Za-z_]\w*$",
        description="FILE.py:NAME of a Python function that gets prompts, completions, ground truths and any columns "
        "of the data, and returns a number for each completion; default: none",
    )
    function_coef: float = Field(1.0, ge=0.0, description="weight of reward.function's values")
    advantage: Literal["rloo", "rloo_simple", "group_norm", "dr_grpo", "reinforce"] = Field(
        "rloo", description="advantage estimator of a group"
    )


class PlacementConfig(Section):
    """Resources of the Ray actors. CPU numbers are reservations; threads are set by threads_per_actor."""

    ray_address: str | None = Field(None, description="cluster to join; default: RAY_ADDRESS, else a local cluster")
    trainer_cpus: float = Field(0.5, gt=0.0, description="CPUs reserved by each trainer rank")
    rollout_cpus: float = Field(0.5, gt=0.0, description="CPUs reserved by each rollout engine")
    feature_cpus: float = Field(0.25, gt=0.0, description="CPUs reserved by each feature replica")
    reference_cpus: float = Field(0.25, gt=0.0, description="CPUs reserved by each reference model replica")
    aggregator_cpus: float = Field(0.25, gt=0.0, description="CPUs reserved by the reward aggregator")
    gpus_per_trainer_rank: float = Field(1.0, ge=0.0, description="GPUs of a trainer rank on a GPU cluster")
    gpus_per_reference_replica: float = Field(1.0, ge=0.0, description="GPUs of a reference replica on a GPU cluster")
    gpus_per_feature_replica: float = Field(1.0, ge=0.0, description="GPUs of a feature replica on a GPU cluster")
    require_gpus: bool = Field(False, description="refuse a cluster without GPUs instead of running on its CPUs")
    share_gpus: Literal["auto", "always", "never"] = Field(
        "auto",
        description="put a trainer rank, a rollout engine and a feature replica on each GPU, where they take turns; "
        "auto: when there are too few GPUs for one each",
    )
    threads_per_actor: int = Field(0, ge=0, description="compute threads of an actor on CPU; 0: all cores")
    start_timeout_s: float = Field(300.0, gt=0.0, description="limit for the actors to load their models, in seconds")
    schedule_timeout_s: float = Field(10.0, gt=0.0, description="limit for Ray to place the actors, in seconds")


class LoggingConfig(Section):
    """Where a run leaves its traces."""

    root: str = Field("runs", description="folder that holds the run directories")
    existing_run: Literal["error", "move_aside"] = Field(
        "error", description="what happens when the run directory exists; move_aside renames the old one"
    )
    tensorboard: bool = Field(True, description="write tensorboard event files")
    wandb_project: str | None = Field(None, description="Weights & Biases project; default: not used")
    wandb_mode: Literal["online", "offline"] = Field("offline", description="whether wandb uploads")
    progress: bool = Field(True, description="progress bars on the terminal")


class EBFTConfig(Section):
    """A whole run: `openrlhf-ebft train CONFIG`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$",  # not `..`: that is another folder
        max_length=240,  # file names end at 255 bytes, endings included
        description="run name; the run directory is logging.root/name",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of data order, sampling and initialisation")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    features: FeatureConfig = Field(default_factory=FeatureConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    lora: LoRAConfig = Field(default_factory=LoRAConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _resolve_by_mode(self) -> Self:
        """Fills in what depends on data.mode, so that a printed or saved configuration shows it."""
        if self.rollout.engine == "auto":
            needs_vllm = self.rollout.tensor_parallel_size > 1 or self.rollout.weight_transfer in ("nccl", "ipc")
            self.rollout.engine = "transformers" if self.data.mode == "strided" and not needs_vllm else "vllm"
        if self.features.embed_method is None:
            self.features.embed_method = "last_token" if self.data.mode == "strided" else "completion_mean"
        return self

    @property
    def has_reference_actors(self) -> bool:
        """Whether the KL term needs actors with a reference model."""
        return self.policy.kl_coef > 0 and self.reference.source == "separate"

    @property
    def samples_completions(self) -> bool:
        """Whether training or evaluation samples completions, and so needs engines, features and rewards."""
        return self.policy.objective == "ebft" or self.evaluation.max_examples > 0

    @property
    def has_feature_actors(self) -> bool:
        """Whether features come from actors of their own."""
        return self.samples_completions and self.features.source == "separate"

    @property
    def base_model_gives_features(self) -> bool:
        """Whether features come from the trainer's own base model."""
        return self.samples_completions and self.features.source == "policy_base"

    @property
    def completion_limit(self) -> int:
        """Most tokens that a completion can have."""
        return self.data.generate_max_len if self.data.mode == "strided" else self.rollout.max_new_tokens
