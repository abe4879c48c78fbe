"""A reward function of the user's: what it gets, what it may return, and who is named when it fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.data.reward_function import RewardFunction, RewardFunctionError, SampledText, TreeRewards
from tests.tiny_models import EOS_ID, tiny_tokenizer
from tests.trees import make_reference, make_tree


@pytest.fixture
def write(tmp_path):
    """Writes a file with functions and returns NAME in it, loaded."""

    def make(body, name="score", **options):
        path = tmp_path / "rewards.py"
        path.write_text(body)
        return RewardFunction(f"{path}:{name}", **options)

    return make


def texts(count=6):
    return [SampledText(f"id-{i // 2}", f"p{i}", "c" * (i + 1), f"g{i}") for i in range(count)]


def test_strings_in_numbers_out(write):
    function = write(
        "def score(prompts, completions, ground_truths):\n"
        "    assert all(isinstance(text, str) for text in [*prompts, *completions, *ground_truths])\n"
        "    return [len(c) + int(p[1]) / 10 + int(g[1]) / 100 "
        "for p, c, g in zip(prompts, completions, ground_truths)]\n"
    )
    assert function(texts()) == pytest.approx([1.0, 2.11, 3.22, 4.33, 5.44, 6.55])


@pytest.mark.parametrize(
    "signature",
    ["prompts, completions, ground_truths, example_ids", "*, completions, **others"],
)
def test_example_ids_come_when_they_are_asked_for(write, signature):
    ids = "example_ids" if "example_ids" in signature else "others['example_ids']"
    function = write(f"def score({signature}):\n    return [int(name[-1]) for name in {ids}]\n")
    assert function(texts()) == [0, 0, 1, 1, 2, 2]


def test_columns_of_the_data_come_by_the_names_of_parameters(write):
    """`limit` has a default and stays what it is, though the rows have such a column."""
    function = write(
        "def score(prompts, completions, ground_truths, answer, *, level, limit=7, **others):\n"
        "    assert set(others) == {'example_ids'}\n"
        "    return [a[0] + l + limit for a, l in zip(answer, level)]\n"
    )
    assert function.columns == ("answer", "level")
    row = {"answer": [100], "level": 0.5, "limit": 1}
    rows = [replace(text, columns={**row, "answer": [100 * i]}) for i, text in enumerate(texts(3))]
    assert function(rows) == [7.5, 107.5, 207.5]


@pytest.mark.parametrize(
    "values",
    ["tuple(range(6))", "__import__('numpy').arange(6.0)", "__import__('torch').arange(6)", "(i for i in range(6))"],
)
def test_any_row_of_numbers_is_taken(write, values):
    function = write(f"def score(prompts, completions, ground_truths):\n    return {values}\n")
    assert function(texts()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(("values", "got"), [("[1.0]", 1), ("[1.0] * 5", 5), ("[]", 0)])
def test_case_b07_a_wrong_number_of_values_is_an_error(write, values, got):
    function = write(f"def score(prompts, completions, ground_truths):\n    return {values}\n")
    with pytest.raises(RewardFunctionError, match=f"rewards.py:score must return .*expected 6, got {got}"):
        function(texts())


@pytest.mark.parametrize("values", ["{0, 1, 2, 3, 4, 5}", "dict.fromkeys(range(6), 1.0)", "'000000'", "1.0", "None"])
def test_values_that_are_no_list_are_an_error(write, values):
    function = write(f"def score(prompts, completions, ground_truths):\n    return {values}\n")
    with pytest.raises(RewardFunctionError, match=r"rewards.py:score must return a list of 6 numbers"):
        function(texts())


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "None", "'1.0'", "[1.0]", "1e39", "10**400"])
def test_a_value_that_is_no_finite_number_names_the_example(write, value):
    function = write(
        f"def score(prompts, completions, ground_truths):\n    return [0.0, 0.0, 0.0, {value}, 0.0, 0.0]\n"
    )
    with pytest.raises(RewardFunctionError, match=r"example id-1: .*rewards.py:score returned .*'cccc'"):
        function(texts())


def test_no_list_at_all_is_an_error(write):
    function = write("def score(prompts, completions, ground_truths):\n    return 1.0\n")
    with pytest.raises(RewardFunctionError, match="list of 6 numbers, one for each completion, not 1.0"):
        function(texts())


def test_an_exception_names_the_example(write):
    function = write(
        "def score(prompts, completions, ground_truths):\n    return [1 / (len(c) - 5) for c in completions]\n"
    )
    with pytest.raises(RewardFunctionError, match=r"example id-2: .*score raised ZeroDivisionError") as caught:
        function(texts())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_of_the_whole_batch_alone_says_so(write):
    function = write(
        "def score(prompts, completions, ground_truths):\n"
        "    if len(prompts) > 4:\n        raise MemoryError('too many')\n    return [0.0] * len(prompts)\n"
    )
    with pytest.raises(RewardFunctionError, match="MemoryError: too many; on all 6 completions together"):
        function(texts())


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ("score = 1\n", "score", r"has no function 'score'; it has \[\]"),
        ("def other():\n    pass\n", "score", r"no function 'score'; it has \['other'\]"),
        ("def score(prompts, answers):\n    pass\n", "score", r"does not fit \(prompts, answers\)"),
        ("def score(prompts, completions, answer, /, **others):\n    pass\n", "score", "does not fit"),
        ("def score(:\n", "score", "cannot be run: SyntaxError"),
        ("import not_a_module\n", "score", "ModuleNotFoundError"),
    ],
)
def test_faults_show_when_the_function_is_loaded(write, body, name, message):
    with pytest.raises(UserError, match=message):
        write(body, name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file: .*nowhere.py"):
        RewardFunction(f"{tmp_path}/nowhere.py:score")


def test_trees_give_their_texts(write, tmp_path):
    """Two anchors of two completions each; EOS and padding do not show in the texts."""
    tokenizer = tiny_tokenizer(tmp_path)
    function = write(
        "seen = []\ndef score(prompts, completions, ground_truths, example_ids):\n"
        "    seen.extend(zip(example_ids, prompts, completions, ground_truths))\n"
        "    return [float(len(seen) + i) for i in range(len(prompts))]\n"
    )
    tree = make_tree(replace(make_reference(9, [4, 6], seed=5), columns=({"answer": 1},)), [[2, 3], [1, 2]])
    tree.branch_tokens[-1] = EOS_ID
    values = TreeRewards(function, tokenizer).values([tree])
    assert {key: value.tolist() for key, value in values.items()} == {
        ("example-5", 0): [4.0, 5.0],
        ("example-5", 1): [6.0, 7.0],
    }
    ids = tree.reference.token_ids
    seen = function._function.__globals__["seen"]
    completions = tree.completions()
    assert [row[1] for row in seen] == [tokenizer.decode(ids[:4])] * 2 + [tokenizer.decode(ids[:6])] * 2
    assert [row[3] for row in seen] == [tokenizer.decode(ids[4:])] * 2 + [tokenizer.decode(ids[6:])] * 2
    assert seen[1][2] == tokenizer.decode(completions[0][1]) and len(completions[0][1]) == 3
    assert seen[3][2] == tokenizer.decode(completions[1][1][:1])
    tree.branch_tokens[-1] = stop = 30  # a chat's end of turn that its tokenizer does not call special
    TreeRewards(function, tokenizer, {EOS_ID, stop}).values([tree])
    assert seen[7][2] == tokenizer.decode(completions[1][1][:1]) and tokenizer.decode([stop])


def test_the_prompt_and_the_columns_of_a_packed_document_are_its_own(write, tmp_path):
    function = write(
        "def score(prompts, completions, ground_truths, answer):\n"
        "    assert answer == ['second'] * 2\n    return [float(len(p)) for p in prompts]\n"
    )
    reference = make_reference(10, [7], window=3, documents=[0] * 5 + [1] * 5)
    reference = replace(reference, columns=({"answer": "first"}, {"answer": "second"}))
    tree = make_tree(reference, [[2, 2]])
    rewards = TreeRewards(function, tiny_tokenizer(tmp_path))
    expected = float(len(rewards._tokenizer.decode(reference.token_ids[5:7])))
    assert torch.equal(rewards.values([tree])["example-0", 0], torch.full((2,), expected, dtype=torch.float64))


def test_a_generator_that_fails_while_it_is_read_names_the_example(write):
    function = write(
        "def score(prompts, completions, ground_truths):\n    yield from (1 / len(text) for text in completions)\n"
    )
    rows = [SampledText("a", "p", "text", "truth"), SampledText("b", "p", "", "truth")]
    assert function(rows[:1]) == [0.25]
    with pytest.raises(RewardFunctionError, match="example b: reward function .* raised ZeroDivisionError"):
        function(rows)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("exact_match", [1.0, 0.0, 0.0]), ("parses", [1.0, 1.0, 0.0]), ("last_number", [0.0, 1.0, 0.0])],
)
def test_the_example_functions(name, expected):
    path = Path(__file__).parents[2] / "examples" / "verifiable_rewards.py"
    rows = [
        SampledText("a", "def f(x):\n", "    return x\n", "    return x", {"answer": 3}),
        SampledText("b", "def f(x):\n", "    return 2", "    return x", {"answer": "2.0"}),
        SampledText("c", "def f(x):\n", "return y", "    return x", {"answer": "1,000"}),
    ]
    assert RewardFunction(f"{path}:{name}")(rows) == expected
