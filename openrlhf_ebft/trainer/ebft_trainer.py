"""The order of events of a run: rollout, features, rewards, train, sync, evaluate. No role's own logic lives here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace

from openrlhf_ebft.actors.cluster import RunActors
from openrlhf_ebft.actors.waiting import ActorError, StateLost
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.aggregation import NonFiniteGroups, StepRewards
from openrlhf_ebft.core.completion_metrics import completion_metrics, length_warning
from openrlhf_ebft.core.experience import Reference, Rollout, RolloutRequest
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.core.step_batch import TrainItem, without_advantages
from openrlhf_ebft.data.batches import BatchPlan
from openrlhf_ebft.trainer.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from openrlhf_ebft.trainer.clock import PhaseClock
from openrlhf_ebft.trainer.console import Console
from openrlhf_ebft.trainer.evaluation import EvaluationResult, evaluate
from openrlhf_ebft.trainer.evaluation_tasks import EvaluationRecorder
from openrlhf_ebft.trainer.histories import sample_references
from openrlhf_ebft.trainer.interrupts import Interrupts
from openrlhf_ebft.trainer.state import Schedule, TrainerState
from openrlhf_ebft.trainer.tracking import SkippedStep, Tracker


class NonFiniteSteps(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


class EBFTTrainer:
    """Drives the actors through a run."""

    def __init__(
        self,
        config: EBFTConfig,
        actors: RunActors,
        references: Sequence[Reference],
        plan: BatchPlan,
        schedule: Schedule,
        tracker: Tracker,
        console: Console,
    ) -> None:
        self.config = config
        self.actors = actors
        self.references = references
        self.plan = plan
        self.schedule = schedule
        self.tracker = tracker
        self.console = console
        self.state = TrainerState()
        self.recorder: EvaluationRecorder | None = None  # measures the tasks of evaluations and keeps their tables
        self._is_ebft = config.policy.objective == "ebft"

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint: trainer ranks read theirs, the engines get the weights with the next sync."""
        self.actors.trainer.load_checkpoint(checkpoint.trainer)
        self.state = checkpoint.state
        self.console.say(f"resumed after step {self.state.step} from {checkpoint.path}")

    def begin(self) -> None:
        """Goes on from the first step, with trainer ranks that have just been started."""
        self.state = TrainerState()
        self.console.say("begun again from the first step: there is no checkpoint yet")

    def rewind_records(self) -> None:
        """Drops the records of steps that come again."""
        self.tracker.rewind(self.state.step, final_too=self.state.step == self.schedule.total)

    def train(self, heldout: Sequence[Reference], interrupts: Interrupts, checkpoints: CheckpointStore) -> None:
        """Runs the phases that are left, until the end or until an interrupt asks to stop.

        Args:
            heldout: references of the evaluations in between.
            interrupts: asked after every step.
            checkpoints: where checkpoints go.

        Raises NonFiniteSteps after too many steps in a row that changed nothing; names the last checkpoint.
        """
        main = "EBFT" if self._is_ebft else "supervised"
        steps = {"supervised warm-up": self.schedule.sft_steps, main: self.schedule.total}
        try:
            for phase, last in steps.items():
                if interrupts.requested or self.state.step >= last:
                    continue  # the bar of a phase without steps would mislead
                with self.console.phase(phase, last - self.state.step):
                    while self.state.step < last and not interrupts.requested:
                        evaluation = self._step(heldout)
                        checkpoints.look()
                        self._checkpoint_if_due(checkpoints, interrupts, evaluation)
        except StateLost:
            raise
        except BaseException as error:
            # What went wrong is told; a checkpoint that fails as well is no more than missing.
            with suppress(ActorError, CheckpointError):
                checkpoints.finish()
            if not isinstance(error, NonFiniteSteps):
                raise
            checkpoint = checkpoints.newest()
            good = f"the last good checkpoint is {checkpoint.path}" if checkpoint else "there is no checkpoint"
            raise NonFiniteSteps(f"{error}; {good}") from None
        checkpoints.finish()

    def _step(self, heldout: Sequence[Reference]) -> dict[str, float | None]:
        """One step and the evaluation that is due after it; returns its held-out values, empty without one."""
        if self.state.step < self.schedule.sft_steps:
            self._sft_step()
            return {}
        if self._is_ebft:
            if self.state.step == self.schedule.sft_steps or not self.actors.weights.version:
                self.actors.weights.push()
            self._ebft_step()
        else:
            self._sft_step()
        every = self.config.evaluation.every_steps
        done = self.state.step - self.schedule.sft_steps
        if every and heldout and done % every == 0 and self.state.step < self.schedule.total:
            return self.evaluate(heldout).metrics()
        return {}

    def _checkpoint_if_due(
        self, store: CheckpointStore, interrupts: Interrupts, evaluation: dict[str, float | None]
    ) -> None:
        settings = self.config.checkpoint
        due = settings.every_steps and self.state.step % settings.every_steps == 0
        due = due or store.is_among_best(evaluation)
        if not due and not (interrupts.requested and settings.on_interrupt):
            return
        if self._is_ebft and self.state.step > self.schedule.sft_steps:
            # A resumed run starts with fresh weights in its engines; so must the one that goes on.
            self.actors.weights.push()
        trainer = self.actors.trainer
        store.save(
            self.state,
            lambda folder: trainer.save_checkpoint(folder, background=settings.background),
            bytes_needed=trainer.checkpoint_bytes,
            evaluation=evaluation,
            is_written=trainer.checkpoint_is_written if settings.background else None,
        )

    def evaluate(self, heldout: Sequence[Reference]) -> EvaluationResult:
        """Evaluates the current policy, or its averaged weights, on the held-out references; records the result."""
        use_average = self.config.evaluation.use_ema and self.state.step > 0
        clock = PhaseClock()
        with self.actors.averaged() if use_average else nullcontext(), self.console.phase("evaluation", 1):
            self.actors.weights.push()
            result = evaluate(self.actors, self.config, heldout)
            self.console.advance()
        metrics = result.metrics()
        if self.recorder is not None:
            metrics |= self.recorder.record(self.state.step, result, self.actors)
        self.actors.rollout.forget_prefixes()  # training goes on as if nothing had been sampled here
        self.tracker.log(self.state.step, "evaluation", metrics | clock.metrics())
        self.console.evaluation(self.state.step, metrics)
        return result

    def _sft_step(self) -> None:
        clock = PhaseClock()
        items = [without_advantages(RolloutTree.without_branches(ref)) for ref in self._next_references()]
        with clock.phase("train"):
            metrics = self.actors.trainer.train_step(items, "sft")
        self._finish_step("sft", metrics, clock, self._skip(items, metrics))

    def _ebft_step(self) -> None:
        clock = PhaseClock()
        references = self._next_references()
        with clock.phase("rollout"):
            generate, requests = self.actors.rollout.generate, self._requests(references)
            references, rollouts = sample_references(generate, requests, self.config.data.history)
        trees = [RolloutTree.from_rollout(ref, rollout) for ref, rollout in zip(references, rollouts, strict=True)]
        shape = self._rollout_metrics(references, rollouts)
        with clock.phase("features"):
            try:
                rewards = self.actors.rewards.rewards(self.state.step, trees)
            except ActorError as error:
                if not isinstance(error.cause, NonFiniteGroups):
                    raise
                examples = tuple(dict.fromkeys(example for example, _ in error.cause.groups))
                self._sync_if_due(clock)
                self._finish_step(
                    "ebft", {"applied": 0.0, **shape}, clock, SkippedStep("features are not finite", examples)
                )
                return
        items = [TrainItem.from_groups(tree, rewards.advantages) for tree in trees]
        if self.config.policy.kl_coef > 0:
            with clock.phase("reference"):
                items = self.actors.with_reference(items)
        with clock.phase("train"):
            metrics = self.actors.trainer.train_batch(items)
        self._sync_if_due(clock)
        self._finish_step("ebft", {**metrics, **_reward_metrics(rewards), **shape}, clock, self._skip(items, metrics))

    def _sync_if_due(self, clock: PhaseClock) -> None:
        """After the present EBFT step; counted from the first one, at whose beginning the engines are updated, too."""
        done = self.state.step + 1 - self.schedule.sft_steps
        with clock.phase("sync"):
            if done % self.config.rollout.sync_every_steps == 0:
                self.actors.weights.push()

    def _skip(self, items: Sequence[TrainItem], metrics: dict[str, float]) -> SkippedStep | None:
        """Why the trainer applied no step; None when it did."""
        examples = self.actors.trainer.take_nonfinite_examples()
        if metrics["applied"]:
            return None
        if examples:
            return SkippedStep("the loss is not finite", tuple(examples))
        return SkippedStep("the gradient is not finite", tuple(item.tree.example_id for item in items))

    def _next_references(self) -> list[Reference]:
        numbers, cursor = self.schedule.next_rows(self.plan, self.state)
        self.state = replace(self.state, cursor=cursor)
        return _with_unique_ids([self.references[number] for number in numbers])

    def _requests(self, references: Sequence[Reference]) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                reference=reference,
                num_samples=self.config.rollout.samples_per_prompt,
                seed=derive_seed(self.config.seed, "rollout", self.state.step, reference.example_id),
            )
            for reference in references
        ]

    def _rollout_metrics(self, references: Sequence[Reference], rollouts: Sequence[Rollout]) -> dict[str, float]:
        shape = completion_metrics(references, rollouts)
        warning = length_warning(shape)
        if warning is not None:
            self.console.say(f"warning: {warning}")
        versions = [rollout.weight_version for rollout in rollouts]
        return {f"completion/{name}": value for name, value in asdict(shape).items()} | {
            "rollout/weight_version": float(min(versions)),
        }

    def _finish_step(
        self, phase: str, metrics: dict[str, float | None], clock: PhaseClock, skipped: SkippedStep | None
    ) -> None:
        failed = not metrics["applied"]
        in_a_row = self.state.nonfinite_in_a_row + 1 if failed else 0
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            nonfinite_total=self.state.nonfinite_total + failed,
            nonfinite_in_a_row=in_a_row,
        )
        self.actors.budget.reached(self.state.step)
        record = {**metrics, "nonfinite_steps": float(self.state.nonfinite_total), **clock.metrics()}
        self.tracker.log(self.state.step, phase, record, skipped)
        warm_up = self.schedule.sft_steps
        number, last = self.state.step - warm_up, self.schedule.ebft_steps
        if self.state.step <= warm_up:
            number, last = self.state.step, warm_up
        self.console.step(phase, number, last, record)
        self.console.advance()
        if skipped is not None:
            self.console.say(f"warning: step {self.state.step} changed nothing: {skipped}")
        if in_a_row >= self.config.policy.max_nonfinite_steps:
            raise NonFiniteSteps(
                f"step {self.state.step} ({phase}): {in_a_row} steps in a row were not finite "
                f"(policy.max_nonfinite_steps); the last one: {skipped}"
            )


def _with_unique_ids(references: Sequence[Reference]) -> list[Reference]:
    """A batch over the edge of an epoch may hold a row twice; groups and seeds are told apart by the example id."""
    seen: Counter[str] = Counter()
    unique = []
    for reference in references:
        seen[reference.example_id] += 1
        count = seen[reference.example_id]
        unique.append(reference if count == 1 else replace(reference, example_id=f"{reference.example_id}#{count}"))
    return unique


def _reward_metrics(rewards: StepRewards) -> dict[str, float | None]:
    statistics = rewards.statistics
    return {
        "reward/mean": statistics.reward_mean,
        "reward/std": statistics.reward_std,
        "reward/alignment": statistics.alignment,
        "reward/diversity": statistics.diversity,
        "reward/raw_alignment": statistics.raw_alignment,
        "reward/cfm": statistics.cfm,
        "reward/cfm_unbiased": statistics.cfm_unbiased,
        "reward/zero_advantage_share": statistics.zero_advantage_share,
    } | ({} if statistics.function is None else {"reward/function": statistics.function})
