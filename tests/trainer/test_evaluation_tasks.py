"""The tasks of an evaluation, in real runs of the whole stack and on results with known values."""

import json
import math
from types import SimpleNamespace

import pytest
import yaml

from openrlhf_ebft.config import ConfigError, load_config
from openrlhf_ebft.core.completion_metrics import CompletionMetrics
from openrlhf_ebft.core.experience import Completion, Rollout
from openrlhf_ebft.data.tokenizers import load_run_tokenizer
from openrlhf_ebft.rollouts.engine import build_engine
from openrlhf_ebft.trainer.evaluation import EvaluationResult, ExampleResult
from openrlhf_ebft.trainer.evaluation_tasks import EvaluationRecorder, EvaluationTasks, held_out_table
from openrlhf_ebft.trainer.run import sampling_settings
from tests.trainer import runs

pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    runs.write_inputs(folder)
    # The first problem is solved by any completion, the second by none.
    problems = [
        {"task_id": "easy", "prompt": "def f():\n    return 1\n#", "test": "def check(f): assert f() == 1"},
        {"task_id": "hard", "prompt": "def f():\n    return 1\n#", "test": "def check(f): assert f() == 2"},
    ]
    lines = (json.dumps({**problem, "entry_point": "f"}) for problem in problems)
    (folder / "problems.jsonl").write_text("\n".join(lines))
    return folder


def tasks(folder, **more):
    settings = {"code_problems": str(folder / "problems.jsonl"), "code_samples": 2, "code_k": [1, 2]}
    settings |= {"code_max_new_tokens": 4, "execute_code": True, "max_examples": 4}
    return {"tasks": ["code", "translation"], **settings, **more}


@pytest.mark.stack
def test_run_and_command_measure_the_tasks_and_training_does_not_notice(folder):
    quick = {"engine": "transformers"}
    plain = runs.write_config(folder, "plain", rollout=quick)
    measured = runs.write_config(folder, "measured", rollout=quick, evaluation=tasks(folder, every_steps=1))
    for config in (plain, measured):
        code, output = runs.run("train", str(config))
        assert code == 0, output
    steps = [record for record in runs.read_metrics(folder, "measured") if record["phase"] != "evaluation"]
    assert steps == [record for record in runs.read_metrics(folder, "plain") if record["phase"] != "evaluation"]
    evaluations = [record for record in runs.read_metrics(folder, "measured") if record["phase"] == "evaluation"]
    assert [record["code/pass@1"] for record in evaluations] == [0.5] * len(evaluations)
    assert len(evaluations) == 4
    assert all(0 <= record["translation/chrf"] <= 100 for record in evaluations)
    table = json.loads((folder / "runs" / "measured" / "evaluations" / "step-5.json").read_text())
    assert table["code"]["outcomes"] == {"passed": 2, "failed": 2}
    assert (folder / "runs" / "measured" / "report.html").read_text().count("data-chart") > 10

    out = folder / "result.json"
    model = folder / "runs" / "measured" / "model"
    code, output = runs.run("evaluate", str(model), str(measured), "--out", str(out))
    assert code == 0, output
    result = json.loads(out.read_text())
    assert result["code"]["pass@2"]["value"] == 0.5
    assert result["translation"]["bleu"]["count"] == 4
    assert result["translation"]["chrf"]["value"] == pytest.approx(evaluations[-1]["translation/chrf"], abs=1e-6)
    assert result["sampling"]["sampling/temperature"] == 0.6
    assert result["model"] == str(model)


def test_problems_are_completed_by_an_engine_and_run(folder):
    """Without Ray: the plain engine class in the place of its group of actors."""
    config = load_config(
        runs.write_config(
            folder, "engine", rollout={"engine": "transformers"}, evaluation=tasks(folder, tasks=["code"])
        )
    )
    tokenizer = load_run_tokenizer(config)
    suite = EvaluationTasks.prepare(config, tokenizer, heldout=[])
    engine = build_engine(
        config.model.path,
        config.rollout,
        sampling_settings(config, tokenizer),
        dtype=config.model.dtype,
        max_model_len=128,
        seed=config.seed,
        threads=1,
    )
    engine_group = SimpleNamespace(rollout=engine)
    table = suite._code(engine_group)
    assert (table["problems"], table["programs"]) == (2, 4)
    assert table["outcomes"] == {"passed": 2, "failed": 2}
    assert table["pass@1"]["value"] == table["pass@2"]["value"] == 0.5
    assert [detail["task_id"] for detail in table["details"]] == ["easy", "easy", "hard", "hard"]
    again = suite._code(engine_group)
    assert again == table  # seeds depend on run seed and problem alone


@pytest.fixture
def result():
    rollouts = tuple(Rollout(str(i), ((Completion((5, 6), (-1.0, -1.0), "length"),),), 3) for i in range(3))
    examples = tuple(
        ExampleResult(str(i), ce, 0.5, 0.0, 1.0, 0.1, None, reward_best_of_n=2.0, ngram_overlap=0.25, tokens=n)
        for i, (ce, n) in enumerate([(1.0, 1), (2.0, 3), (3.0, 6)])
    )
    return EvaluationResult(examples, CompletionMetrics(2.0, 1.0, 0.0, 1.0, 0.0, 0.0), rollouts, 3)


def test_table_of_known_values(folder, result):
    table = held_out_table(result, load_config(runs.write_config(folder, "table")))
    assert (table["examples"], table["completions"], table["weight_version"]) == (3, 3, 3)
    assert table["metrics"]["ce"]["value"] == pytest.approx(2.0)
    assert table["metrics"]["perplexity"]["value"] == pytest.approx(math.exp((1 + 6 + 18) / 10))
    assert result.metrics()["perplexity"] == pytest.approx(math.exp(2.5))
    assert "cfm_unbiased" not in table["metrics"]
    assert table["metrics"]["ce"]["low"] < 2.0 < table["metrics"]["ce"]["high"]
    json.dumps(table, allow_nan=False)


def test_a_failing_task_is_reported_and_the_run_goes_on(folder, result, tmp_path):
    config = load_config(runs.write_config(folder, "failing", evaluation=tasks(folder, tasks=["translation"])))
    said = []
    broken = EvaluationTasks(config, None, heldout=[], problems=[], references=[])  # rows do not match the rollouts
    metrics = EvaluationRecorder(broken, tmp_path, said.append).record(7, result, actors=None)
    assert metrics == {"tasks_failed": 1.0}
    assert "tasks of the evaluation after step 7 failed" in said[0]
    table = json.loads((tmp_path / "evaluations" / "step-7.json").read_text())
    assert table["metrics"]["ce"]["value"] == pytest.approx(2.0)
    assert table["failed"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["code"]}, "evaluation.execute_code = false"),
        ({"tasks": ["code"], "execute_code": True, "code_k": [1, 5]}, "set evaluation.code_samples to 5"),
        ({"tasks": ["translation"], "max_examples": 0}, "evaluation.max_examples"),
        ({"comet_model": "x"}, "add it to evaluation.tasks"),
        ({"tasks": ["math"]}, "must be one of code, translation"),
    ],
)
def test_rules(folder, settings, message):
    path = runs.write_config(folder, "rule", evaluation=settings)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_config(path)


def test_translation_needs_whole_completions(folder):
    path = runs.write_config(folder, "strided", data={"mode": "strided"}, evaluation={"tasks": ["translation"]})
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="data.mode = strided samples short windows"):
        load_config(path)
