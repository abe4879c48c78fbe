"""Harms real runs of the whole stack and prints what became of them: python -m scripts.chaos [CASE ...].

Every case trains the same tiny model with the same seeds, with real Ray, DeepSpeed and rollout engines, and harms a
process or a file at a random moment. The table says what failed, in which step, after how many seconds the run was
back at work, which work was done twice, and whether metrics and final weights equal those of the run that nothing
happened to. A case that does not end as it should makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from openrlhf_ebft.trainer.console import aligned
from scripts.chaos_run import LIMIT_S, Outcome, Run
from tests.cluster.ray_nodes import Cluster, new_cluster
from tests.trainer import runs, victims

SETTINGS: dict[str, Any] = {
    "policy": {"max_steps": 14, "sft_warmup_steps": 1},
    "evaluation": {"every_steps": 5, "max_examples": 2},
    "checkpoint": {"every_steps": 3, "on_full_disk": "warn"},
    "recovery": {"max_restarts": 8, "backoff_s": 0.5, "heartbeat_s": 10.0},
    "placement": {"schedule_timeout_s": 90.0},
}


def kill_engine(run: Run) -> Outcome:
    return harmed(run, "RolloutEngineActor", "rollout engine 0 is back", "its requests")


def kill_feature_network(run: Run) -> Outcome:
    return harmed(run, "FeatureNetworkActor", "feature network 0 is back", "its trees")


def kill_aggregator(run: Run) -> Outcome:
    return harmed(run, "RewardAggregatorActor", "reward aggregator is back", "the step's rewards")


def kill_trainer_rank(run: Run) -> Outcome:
    return harmed(run, "PolicyTrainerActor", "the trainer is back", None)


def hang_engine(run: Run) -> Outcome:
    return harmed(run, "RolloutEngineActor", "rollout engine 0 is back", "its requests", signal.SIGSTOP)


def hang_feature_network(run: Run) -> Outcome:
    return harmed(run, "FeatureNetworkActor", "feature network 0 is back", "its trees", signal.SIGSTOP)


def hang_aggregator(run: Run) -> Outcome:
    return harmed(run, "RewardAggregatorActor", "reward aggregator is back", "the step's rewards", signal.SIGSTOP)


def hang_trainer_rank(run: Run) -> Outcome:
    return harmed(run, "PolicyTrainerActor", "the trainer is back", None, signal.SIGSTOP)


def harmed(run: Run, kind: str, back: str, lost: str | None, number: signal.Signals = signal.SIGKILL) -> Outcome:
    """Sends a signal to an actor; `lost` None: the trainer, which says itself what is done again."""
    step = random.randint(4, 8)
    run.reach(step)
    victims.harm(run.process, kind, number)
    seconds = run.seconds_until(back)
    return Outcome(f"step {step + 1}", seconds, lost or run.redone())


def out_of_memory(run: Run) -> Outcome:
    """The engine gets no more memory: the kernel refuses it (RLIMIT_AS), as in a container that is full."""
    step = random.randint(4, 8)
    run.reach(step)
    (pid,) = victims.actors_of(run.process, "RolloutEngineActor")
    resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    seconds = run.seconds_until("rollout engine 0 is back")
    return Outcome(f"step {step + 1}", seconds, "its requests")


def kill_driver(run: Run) -> Outcome:
    run.reach(random.randint(4, 8))
    run.kill()
    return run.restart()


def damage_checkpoint(run: Run) -> Outcome:
    """The driver is killed, and a byte of the newest checkpoint flips while nobody looks."""
    run.wait_until(lambda: (run.path / "checkpoints" / "step-6").exists(), "step-6")
    run.kill()
    newest = max((run.path / "checkpoints").glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
    file = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1
    file.write_bytes(content)
    outcome = run.restart()
    return replace(outcome, good=f"passing over {newest}" in run.output)


def full_disk(run: Run) -> Outcome:
    """The kernel refuses the trainer's writes (RLIMIT_FSIZE) while a checkpoint is due."""
    run.reach(4)
    (pid,) = victims.actors_of(run.process, "PolicyTrainerActor")
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, before[1]))
    run.seconds_until("could not be written")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    (failed,) = re.findall(r"step-(\d+) could not be written", run.output)
    seconds = run.seconds_until("checkpoint: ", run.output.count("checkpoint: ") + 1)
    return Outcome(f"checkpoint {failed}", seconds, "one checkpoint")


def kill_node(run: Run) -> Outcome:
    """All actors are on one of two nodes beside the head's: it is lost whole, and the other one takes over."""
    assert run.cluster is not None
    step = random.randint(4, 8)
    run.reach(step)
    _, *others = run.cluster.nodes
    homes = [node for node in others if "ray::PolicyTrainer" in str(victims.offspring(node.process.pid))]
    homes[0].kill()
    # Which loss shows first depends on the phase of the step; the run is back at work when all four roles are.
    roles = ("rollout engine 0", "feature network 0", "reward aggregator", "the trainer")
    seconds = sum(run.seconds_until(f"{role} is back") for role in roles)
    return Outcome(f"step {step + 1}", seconds, run.redone())


def spend_budget(run: Run) -> Outcome:
    """The engine is killed whenever it is back: past the budget the run ends with one message and exit code 1."""
    run.reach(3)
    for number in range(1, 4):
        victims.harm(run.process, "RolloutEngineActor")
        if number < 3:
            run.seconds_until("rollout engine 0 is back", number)
    code = run.process.wait(LIMIT_S)
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    good = code == 1 and len(errors) == 1 and "recovery.max_restarts = 2" in errors[0]
    return Outcome("step 4 on", None, f"run ended, exit code {code}", good)


def break_features(run: Run) -> Outcome:
    """A token that some rows hold is infinite in the feature network: steps that meet it change nothing."""
    code = run.process.wait(LIMIT_S)
    steps = [record for record in runs.read_metrics(run.folder, run.name) if record["phase"] == "ebft"]
    skipped = [record for record in steps if not record["applied"]]
    versions = [record["rollout/weight_version"] for record in steps]
    applied = [record["applied"] for record in steps]
    unchanged = versions == [versions[0] + sum(applied[:number]) for number in range(len(steps))]
    told = all(record["skipped_because"] == "features are not finite" for record in skipped)
    good = code == 0 and 0 < len(skipped) < len(steps) and unchanged and told
    return Outcome(f"{len(skipped)} steps", None, "nothing: they were left out", good)


@dataclass(frozen=True)
class Case:
    """What happens to a run, and how the run is prepared for it."""

    harm: Callable[[Run], Outcome]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # beside SETTINGS
    nodes: int = 0  # further nodes of a cluster of its own; 0: the run starts a local Ray
    compares: bool = True  # its results must be those of the run that nothing happened to


CASES = {
    case.harm.__name__: case
    for case in (
        Case(kill_engine),
        Case(kill_feature_network),
        Case(kill_aggregator),
        Case(kill_trainer_rank),
        Case(kill_driver),
        Case(kill_node, nodes=2),
        Case(hang_engine),
        Case(hang_feature_network),
        Case(hang_aggregator),
        Case(hang_trainer_rank),
        Case(out_of_memory),
        Case(full_disk),
        Case(damage_checkpoint),
        Case(
            break_features,
            settings={
                "data": {"path": "sevens.jsonl"},
                "features": {"path": "bad"},
                "policy": {"max_nonfinite_steps": 14, "prompts_per_step": 2, "micro_batch_size": 1},
                "rollout": {"max_new_tokens": 2, "min_length_limit": 1},  # the sampler may draw the token, too
                "evaluation": {"every_steps": 0, "max_examples": 0},
            },
            compares=False,
        ),
        Case(spend_budget, settings={"recovery": {"max_restarts": 2}}, compares=False),
    )
}


def start(folder: Path, name: str, case: Case, cluster: Cluster | None) -> Run:
    """Starts a run; paths in a case's settings lie in `folder`."""
    settings = dict(SETTINGS)
    for section, values in case.settings.items():
        placed = {key: str(folder / value) if key == "path" else value for key, value in values.items()}
        settings[section] = settings.get(section, {}) | placed
    environment = runs.environment()
    if cluster is not None:
        environment |= cluster.environment | {"RAY_ADDRESS": cluster.address}
    return Run(
        folder, name, (str(runs.write_config(folder, name, **settings)), "--resume", "auto"), environment, cluster
    )


def row_of(folder: Path, name: str, straight: Run) -> tuple[tuple[str, ...], bool]:
    """Runs a case; returns its line of the table and whether it ended as it should."""
    case = CASES[name]
    cluster = new_cluster() if case.nodes else None
    run = None
    try:
        if cluster is not None:
            cluster.start_head(cpus=1)
            for _ in range(case.nodes):
                cluster.add_node(cpus=2)
        run = start(folder, name, case, cluster)
        outcome = case.harm(run)
        ended = run.process.wait(LIMIT_S) == 0
        equal = ended and is_equal(run, straight)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return (name, "-", "-", "-", "NO"), False
    finally:
        if run is not None:
            run.kill()
        if cluster is not None:
            cluster.stop()
    seconds = "-" if outcome.recovered_s is None else f"{outcome.recovered_s:.1f} s"
    shown = ("yes" if equal else "NO") if case.compares else "-"
    return (name, outcome.when, seconds, outcome.lost, shown), outcome.good and (equal or not case.compares)


def is_equal(run: Run, straight: Run) -> bool:
    """Metrics without timings, and every weight to the last bit."""
    if runs.read_metrics(run.folder, run.name) != runs.read_metrics(run.folder, straight.name):
        return False
    ours, theirs = (load_file(r.path / "model" / "model.safetensors") for r in (run, straight))
    return all(ours[name].equal(tensor) for name, tensor in theirs.items())


def main() -> int:
    description = "Harm runs and show what became of them."
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos", description=description)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random moments; default: a new one")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="rollout engine")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}: choose from {', '.join(CASES)}")
    random.seed(options.seed)
    SETTINGS["rollout"] = {"engine": options.engine}
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    runs.write_inputs(folder, rows=30)
    runs.write_infinite_token(folder, folder / "sevens.jsonl")
    straight = start(folder, "straight", Case(kill_engine), None)
    assert straight.process.wait(LIMIT_S) == 0, straight.output
    rows = [("failure", "in", "recovered", "done twice", "equal result")]
    all_good = True
    for name in options.cases or CASES:
        row, good = row_of(folder, name, straight)
        print("  ".join(row), flush=True)
        rows.append(row)
        all_good = all_good and good
    print("\n" + aligned(rows))
    if all_good:
        shutil.rmtree(folder)
        return 0
    print(f"logs: {folder}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
