"""A whole training run: check everything, start the actors, train, evaluate, save, and always clean up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import ray
from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.actors.cluster import RunActors, connect, start_actors
from openrlhf_ebft.actors.waiting import ActorError
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference, SamplingSettings
from openrlhf_ebft.data.batches import BatchPlan
from openrlhf_ebft.data.load import load_data
from openrlhf_ebft.data.reward_function import RewardFunction
from openrlhf_ebft.data.tokenizers import load_run_tokenizer, stop_token_ids, unpooled_token_ids
from openrlhf_ebft.trainer.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from openrlhf_ebft.trainer.config_changes import check_changes
from openrlhf_ebft.trainer.console import Console, comparison_table
from openrlhf_ebft.trainer.ebft_trainer import EBFTTrainer, NonFiniteSteps
from openrlhf_ebft.trainer.evaluation import EvaluationResult, compare
from openrlhf_ebft.trainer.evaluation_tasks import EvaluationRecorder, EvaluationTasks
from openrlhf_ebft.trainer.interrupts import Interrupts
from openrlhf_ebft.trainer.manifests import data_fingerprint
from openrlhf_ebft.trainer.model_checks import check_sizes, read_models
from openrlhf_ebft.trainer.recovery import carried_through
from openrlhf_ebft.trainer.report import write_report
from openrlhf_ebft.trainer.results import write_results
from openrlhf_ebft.trainer.run_directory import RunDirectory, written_aside
from openrlhf_ebft.trainer.samples import sample_pairs, sample_text
from openrlhf_ebft.trainer.state import Schedule
from openrlhf_ebft.trainer.tracking import Tracker, check_trackers

EXAMPLE_PROMPT = "def add(a, b):"


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """Everything that is known before Ray starts."""

    config: EBFTConfig
    tokenizer: PreTrainedTokenizerBase
    train: list[Reference]
    heldout: list[Reference]
    tasks: EvaluationTasks
    plan: BatchPlan
    schedule: Schedule
    max_model_len: int  # of the rollout engines, in tokens


def run_training(config: EBFTConfig) -> int:
    """Runs `config` to its end; returns the exit code: 0, 1 after a failure, 130 after an interrupt.

    The run directory is made when all actors are up, so that a run that cannot start leaves nothing in the way of the
    next one.

    Raises UserError for wrong input, before Ray starts, and for a cluster that cannot hold the actors.
    """
    console = Console(progress=config.logging.progress)
    folder = RunDirectory.plan(config)
    check_trackers(config)
    return _train(prepare_run(config, console), folder, None, console)


def resume_training(path: Path, config: EBFTConfig, *, allow_change: bool) -> int:
    """Goes on with the run in the run directory `path` from its newest complete checkpoint; as `run_training`.

    Args:
        path: the run directory.
        config: the run's configuration, which may differ from the checkpoint's in what cannot change results.
        allow_change: other differences are allowed, too, but for those that a checkpoint cannot follow.

    Raises UserError when there is no run or no complete checkpoint, when the configuration differs, and when another
    process works in the run directory.
    """
    console = Console(progress=config.logging.progress)
    folder = RunDirectory(path)
    folder.lock()
    checkpoint = CheckpointStore(folder.checkpoints, config, console.say).required()
    return _resume(folder, checkpoint, config, console, allow_change=allow_change)


def start_or_resume(config: EBFTConfig, *, allow_change: bool) -> int:
    """`resume_training` of the run that `config` names when it has a complete checkpoint, else a fresh start.

    A run directory without a checkpoint is renamed; a finished run is left alone. So the same command can be given
    again and again until the run is finished.
    """
    console = Console(progress=config.logging.progress)
    folder = RunDirectory.of(config)
    if not folder.path.exists():
        return run_training(config)
    folder.lock()
    if folder.model.is_dir() and folder.saved_config() == config:
        console.say(f"{folder.path} is finished: {folder.model}")
        return 0
    checkpoint = CheckpointStore(folder.checkpoints, config, console.say).newest()
    if checkpoint is not None:
        return _resume(folder, checkpoint, config, console, allow_change=allow_change)
    aside = folder.move_aside()
    console.say(f"{folder.path} had no complete checkpoint: it is now {aside}, and the run starts afresh")
    return run_training(config)


def _resume(
    folder: RunDirectory, checkpoint: Checkpoint, config: EBFTConfig, console: Console, *, allow_change: bool
) -> int:
    for note in check_changes(checkpoint.manifest, config, allow=allow_change):
        console.say(note)
    check_trackers(config)
    run = prepare_run(config, console)
    if data_fingerprint(run.train) != checkpoint.manifest.data and not allow_change:
        raise UserError(
            f"the training rows of data.path = {config.data.path} are not those of {checkpoint.path}: put them back, "
            "or add --allow-config-change to go on with the new rows"
        )
    folder.replace_config(config, checkpoint.state.step)
    return _train(run, folder, checkpoint, console)


def _train(run: PreparedRun, folder: RunDirectory, checkpoint: Checkpoint | None, console: Console) -> int:
    heldout = f"{len(run.heldout)} held-out rows are evaluated"
    console.say(f"schedule: {_describe(run.config, run.schedule, run.plan)}; {heldout}")
    for note in _batch_notes(run.config, run.plan):
        console.say(f"note: {note}")

    def work(actors: RunActors, interrupts: Interrupts) -> None:
        if checkpoint is None:
            folder.create(run.config)
        if run.config.samples_completions:
            settings = actors.rollout.effective_settings(run.config.rollout.timeout_s, "rollout settings")
            folder.rollout_settings.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        with closing(Tracker(folder.path, run.config)) as tracker:
            trainer = EBFTTrainer(run.config, actors, run.train, run.plan, run.schedule, tracker, console)
            trainer.recorder = EvaluationRecorder(run.tasks, folder.path, console.say)
            if checkpoint is not None:
                trainer.resume(checkpoint)
                trainer.rewind_records()
            store = CheckpointStore(folder.checkpoints, run.config, console.say, data_fingerprint(run.train))
            after = carried_through(trainer, store, lambda: _to_the_end(run, trainer, folder, store, interrupts))
        if after is not None:
            _show_results(run, folder, EvaluationResult.load(folder.first_evaluation), after, console)
        try:
            write_report([folder.path], folder.report)
            console.say(f"report: {folder.report}")
        except UserError as error:  # the model is there: a report that cannot be made must not fail the run
            console.say(f"no report: {error}")
        console.say(f"model: {folder.model}")
        console.say(f"generate: openrlhf-ebft generate {folder.model} {EXAMPLE_PROMPT!r}")

    return on_cluster(run, console, work)


def _to_the_end(
    run: PreparedRun, trainer: EBFTTrainer, folder: RunDirectory, store: CheckpointStore, interrupts: Interrupts
) -> EvaluationResult | None:
    """Trains on from where `trainer` stands, evaluates and saves the model; returns the last evaluation, if any."""
    if run.heldout and trainer.state.step == 0 and not folder.first_evaluation.exists():
        trainer.evaluate(run.heldout).save(folder.first_evaluation)
    trainer.train(run.heldout, interrupts, store)
    if interrupts.requested:
        raise KeyboardInterrupt
    after = trainer.evaluate(run.heldout) if run.heldout else None
    _save_model(run, trainer, folder.model)
    if run.config.policy.export_ema:
        trainer.actors.trainer.use_average(True)
        _save_model(run, trainer, folder.averaged_model)
    return after


def _save_model(run: PreparedRun, trainer: EBFTTrainer, target: Path) -> None:
    with written_aside(target) as aside:
        trainer.actors.trainer.save_model(aside)
        run.tokenizer.save_pretrained(aside)


def on_cluster(run: PreparedRun, console: Console, work: Callable[[RunActors, Interrupts], None]) -> int:
    """Calls `work` with running actors and ends them afterwards, whatever happens; 0, or 130 after an interrupt."""
    try:
        connect(run.config)
        # Ray sets signal handlers of its own when it starts, so ours come after.
        with Interrupts(finish_step=run.config.checkpoint.on_interrupt, say=console.say) as interrupts:
            try:
                actors = _start(run, console)
                try:
                    work(actors, interrupts)
                finally:
                    interrupts.shield()
                    actors.kill()
            finally:
                interrupts.shield()
                ray.shutdown()
    except KeyboardInterrupt:
        console.say("interrupted: the actors have been ended")
        return 130
    except (ActorError, CheckpointError, NonFiniteSteps) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _start(run: PreparedRun, console: Console) -> RunActors:
    def say(text: str) -> None:
        console.say(text)
        console.advance()

    kinds = 3 if run.config.samples_completions else 1
    with console.phase("starting actors", kinds):  # one line from each kind that loads a model
        return start_actors(
            run.config,
            sampling=sampling_settings(run.config, run.tokenizer),
            special_ids=unpooled_token_ids(run.tokenizer, run.config.model.path),
            max_model_len=run.max_model_len,
            total_steps=run.schedule.optimizer_steps,
            say=say,
            report_loss=console.say,
        )


def prepare_run(config: EBFTConfig, console: Console) -> PreparedRun:
    """Loads tokenizer and data and checks everything that can be checked without Ray. Raises UserError."""
    models = read_models(config)
    columns: Sequence[str] = ()
    if config.reward.function is not None:  # a fault of the user's file shows here, before anything starts
        columns = RewardFunction(config.reward.function).columns
    tokenizer = load_run_tokenizer(config)
    train, heldout, report = load_data(config, tokenizer, columns)
    console.say(report.summary())
    heldout = heldout[: config.evaluation.max_examples]
    tasks = EvaluationTasks.prepare(config, tokenizer, heldout)
    plan = BatchPlan(len(train), config.policy.prompts_per_step, config.seed, config.data.shuffle)
    schedule = make_schedule(config, plan)
    return PreparedRun(
        config=config,
        tokenizer=tokenizer,
        train=train,
        heldout=heldout,
        tasks=tasks,
        plan=plan,
        schedule=schedule,
        max_model_len=check_sizes(config, models, [*train, *heldout, *tasks.references]),
    )


def _describe(config: EBFTConfig, schedule: Schedule, plan: BatchPlan) -> str:
    if config.policy.objective == "sft":
        return f"{schedule.total} supervised steps of {plan.batch_size} prompts"
    updates = f", {schedule.updates_per_step} updates each" if schedule.updates_per_step > 1 else ""
    return (
        f"{schedule.sft_steps} supervised steps, {schedule.ebft_steps} EBFT steps of {plan.batch_size} prompts x "
        f"{config.rollout.samples_per_prompt} completions{updates}"
    )


def _batch_notes(config: EBFTConfig, plan: BatchPlan) -> Iterator[str]:
    """What the number of rows does to the batches that the configuration asks for."""
    policy = config.policy
    if plan.batch_size < policy.prompts_per_step:
        yield f"policy.prompts_per_step = {policy.prompts_per_step}, but there are only {plan.num_rows} training rows"
    dropped = plan.dropped_rows(policy.epochs)
    if policy.max_steps is None and dropped:
        yield f"the last {dropped} rows of the last epoch do not fill a batch and are left out"


def _show_results(
    run: PreparedRun, folder: RunDirectory, before: EvaluationResult, after: EvaluationResult, console: Console
) -> None:
    """Prints samples and comparison, and keeps them with the run."""
    pairs = sample_pairs(run.tokenizer, run.heldout, before, after, run.config.evaluation.show_samples)
    changes = compare(before, after)
    write_results(folder.results, changes, pairs)
    for pair in pairs:
        console.say(sample_text(pair))
    console.say("\n" + comparison_table(changes, before, after))


def sampling_settings(config: EBFTConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingSettings:
    """Every sampling field of the rollout engines."""
    return SamplingSettings(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        stop_token_ids=stop_token_ids(tokenizer, config.model.path),
    )


def make_schedule(config: EBFTConfig, plan: BatchPlan) -> Schedule:
    """Phase lengths. Raises UserError when the run would make no optimizer step."""
    policy = config.policy
    if policy.max_steps is None:
        steps, epochs = plan.total_steps(policy.epochs), policy.epochs
    else:
        steps, epochs = policy.max_steps, None
    schedule = Schedule(policy.sft_warmup_steps, steps, epochs, policy.updates_per_batch)
    if schedule.total == 0:
        raise UserError("policy.max_steps = 0 and policy.sft_warmup_steps = 0: the run would train nothing")
    return schedule
