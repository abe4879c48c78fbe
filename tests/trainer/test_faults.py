"""Wrong input through the real command: one message that names the place, exit code 2, before Ray and models start."""

import json
import shutil
from importlib.util import find_spec

import pytest
import ray
import yaml

from openrlhf_ebft.cli.main import main
from tests.tiny_models import CHAT_TEMPLATE, tiny_byte_tokenizer
from tests.trainer import runs

GOOD = {"prompt": "the cat", "ground_truth": " sat on a mat"}
LONG = {"prompt": "the cat sat " * 20, "ground_truth": " on a mat"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    runs.write_inputs(path, rows=8)
    return path


@pytest.fixture
def folder(inputs, tmp_path):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return tmp_path


def train(folder, capsys, **sections):
    """Runs the command on the base configuration with `sections`; returns (exit code, all it printed)."""
    config = runs.write_config(folder, "faulty", **sections)
    code = main(["train", str(config)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def check_refused(folder, code, output, *texts):
    """Refused with one message, nothing started, nothing left behind that the next start would trip over."""
    assert code == 2, output
    for text in texts:
        assert text in output
    assert output.count("error: ") == 1
    assert "Traceback" not in output
    assert not ray.is_initialized()
    assert not (folder / "runs" / "faulty").exists()


def write_lines(folder, *rows):
    """Two good rows, then `rows` (objects or raw bytes), which begin on line 3."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in (GOOD, GOOD, *rows)]
    (folder / "pairs.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def edit_json(name, **values):
    def change(folder):
        path = folder / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


BAD_ROWS = {
    "missing column": ({"prompt": "the cat"}, {}, "missing column", "column 'ground_truth' is missing"),
    "renamed column": (
        {"prompt": "the cat", "ground_truths": "x"},
        {},
        "missing column",
        "did you mean 'ground_truths'?",
    ),
    "null": ({**GOOD, "prompt": None}, {}, "null value", "column 'prompt' is null"),
    "empty prompt": ({**GOOD, "prompt": "  "}, {}, "empty prompt", "column 'prompt' is empty"),
    "empty ground truth": ({**GOOD, "ground_truth": ""}, {}, "empty ground truth", "column 'ground_truth' is empty"),
    "non-text value": ({**GOOD, "prompt": 7}, {}, "non-text value", "must be text, but is a int (7)"),
    "list value": ({**GOOD, "ground_truth": ["a"]}, {}, "non-text value", "must be text, but is a list"),
    "broken JSON": (b'{"prompt": "the', {}, "broken JSON", "broken JSON: "),
    "not an object": (b'["the", "cat"]', {}, "not an object", "must be an object with columns, but is a list"),
    "not UTF-8": (b'{"prompt": "\xff", "ground_truth": "a"}', {}, "not UTF-8", "not UTF-8 text: byte 0xff"),
    "EOS inside": ({**GOOD, "ground_truth": "a<eos>b"}, {}, "EOS inside", "holds '<eos>' before its end"),
    "broken chat": (
        {**GOOD, "chat": [{"role": "user"}]},
        {"messages_column": "chat", "chat_template": "template.jinja"},
        "non-text value",
        "content of message 1 of column 'chat' must be text, but is null",
    ),
}


def prepare_row(folder, name):
    row, data, reason, detail = BAD_ROWS[name]
    write_lines(folder, row)
    if "chat_template" in data:
        (folder / "template.jinja").write_text(CHAT_TEMPLATE)
        data = {**data, "chat_template": str(folder / "template.jinja")}
        turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
        lines = [json.dumps({"chat": turns})] * 2 + [json.dumps(row)]
        (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return data, reason, detail


@pytest.mark.parametrize("name", BAD_ROWS)
def test_strict_runs_stop_at_the_first_bad_row(folder, capsys, name):
    data, _, detail = prepare_row(folder, name)
    code, output = train(folder, capsys, data=data)
    check_refused(folder, code, output, f"{folder / 'pairs.jsonl'}:3: ", detail, "data.on_bad_row = skip")


@pytest.mark.parametrize("name", BAD_ROWS)
def test_skipped_rows_are_counted_and_shown(folder, capsys, name):
    """The model has too few positions for any data, so that the run ends where it would begin."""
    data, reason, detail = prepare_row(folder, name)
    edit_json("config.json", max_position_embeddings=4)(folder)
    code, output = train(folder, capsys, data={**data, "on_bad_row": "skip"})
    place = f"{folder / 'pairs.jsonl'}:3: "
    texts = ("3 rows read, 2 for training, 0 held out, 1 left out", f"left out: 1 x {reason}", place, detail)
    check_refused(folder, code, output, *texts, "4 positions")


@pytest.mark.parametrize(
    ("policy", "texts"),
    [
        ("error", (":3: prompt of ", "above data.max_prompt_tokens = 30", "data.over_long_prompt = skip")),
        ("skip", ("left out: 1 x over-long prompt", ":3: prompt of ", "above data.max_prompt_tokens = 30")),
        ("truncate_left", ("changed: 1 x prompt truncated", ":3: prompt of ", "cut to the last 30")),
    ],
)
def test_over_long_prompts(folder, capsys, policy, texts):
    write_lines(folder, LONG)
    data = {"max_prompt_tokens": 30, "over_long_prompt": policy}
    edit_json("config.json", max_position_embeddings=4)(folder)
    code, output = train(folder, capsys, data=data)
    check_refused(folder, code, output, *texts)


def test_bos_twice_after_a_template(folder, capsys):
    template = folder / "template.jinja"
    template.write_text("<unk><unk>" + CHAT_TEMPLATE)
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<unk>"}))
    code, output = train(folder, capsys, data={"apply_chat_template": True, "chat_template": str(template)})
    check_refused(folder, code, output, "pairs.jsonl:1: ", "begins with '<unk>' twice", "the chat template writes it")


def test_no_chat_template(folder, capsys):
    code, output = train(folder, capsys, data={"apply_chat_template": True})
    check_refused(folder, code, output, "no chat template", "data.chat_template", "data.apply_chat_template to false")


FILES = {
    "missing file": ("none.jsonl", lambda path: None, "no such file or folder"),
    "empty file": ("empty.jsonl", lambda path: path.write_text(""), "holds no rows"),
    "blank file": ("blank.jsonl", lambda path: path.write_text("\n \n"), "holds no rows"),
    "empty folder": ("folder", lambda path: path.mkdir(), "this folder holds no file that ends in one of"),
    "other ending": ("pairs.xml", lambda path: path.write_text("<a/>"), "files must end in one of"),
    "no parquet": ("pairs.parquet", lambda path: path.write_text("x"), "cannot be read as Parquet"),
    "header only": ("pairs.csv", lambda path: path.write_text("prompt,ground_truth\n"), "holds no rows"),
    "broken json": ("pairs.json", lambda path: path.write_text("[{"), "broken JSON"),
    "no folder data": ("data.csv", lambda path: path.mkdir(), "this folder holds no file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("on_bad_row", ["strict", "skip"])
def test_files_without_usable_rows(folder, capsys, name, on_bad_row):
    file, write, message = FILES[name]
    write(folder / file)
    code, output = train(folder, capsys, data={"path": str(folder / file), "on_bad_row": on_bad_row})
    check_refused(folder, code, output, str(folder / file), message)


def without(*names):
    def change(folder):
        for name in names:
            for path in (folder / "model").glob(name):
                path.unlink()

    return change


def write(name, text):
    return lambda folder: (folder / "model" / name).write_text(text)


MODELS = {
    "wrong path": (None, {"path": "/no/such/model"}, ("model.path", "/no/such/model", "no such folder")),
    "relative path": (None, {"path": "./no-such-model"}, ("model.path", "no-such-model", "no such folder")),
    "relative path or name": (None, {"path": "models/none"}, ("model.path", "no such folder in", "name of the hub")),
    "no tokenizer": (without("tokenizer*"), {}, ("tokenizer", "could not be loaded")),
    "no EOS token": (edit_json("tokenizer_config.json", eos_token=None), {}, ("has no EOS token",)),
    "no config": (without("config.json"), {}, ("config.json",)),
    "broken config": (write("config.json", "{"), {}, ("config.json",)),
    "unknown architecture": (edit_json("config.json", model_type="spiral"), {}, ("spiral",)),
    "no weights": (without("*.safetensors"), {}, ("model.path", "no weights")),
    "broken weights": (write("model.safetensors", "x"), {}, ("model.safetensors",)),
    "gguf with vllm": (None, {"path": "some/model.gguf"}, ("rollout.engine = vllm", ".gguf", "transformers")),
    "tokenizer too large": (lambda folder: tiny_byte_tokenizer(folder / "model"), {}, ("259", "64")),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_used(folder, capsys, name):
    change, model, texts = MODELS[name]
    if change is not None:
        change(folder)
    code, output = train(folder, capsys, model=model)
    check_refused(folder, code, output, *texts)
    assert output.splitlines()[-1].startswith(("error: ", "  - ")), "a failed job's last line says what failed"


@pytest.mark.parametrize(
    ("sections", "texts"),
    [
        ({"polcy": {}}, ("polcy", "policy")),
        ({"policy": {"micro_batch_sise": 2}}, ("policy.micro_batch_sise", "policy.micro_batch_size")),
        ({"policy": {"prompts_per_step": "many"}}, ("policy.prompts_per_step", "many")),
        ({"rollout": {"temperature": -1}}, ("rollout.temperature", "-1", "0")),
        ({"features": {"path": "/no/such/network"}}, ("features.path", "/no/such/network")),
        ({"data": {"chat_template": "/no/template"}}, ("data.chat_template", "/no/template")),
        (
            {"policy": {"prompts_per_step": 256, "micro_batch_size": 2, "num_ranks": 7}},
            ("policy.prompts_per_step = 256", "policy.micro_batch_size = 2", "policy.num_ranks = 7", "252 or 266"),
        ),
        ({"rollout": {"max_model_len": 1030}}, ("rollout.max_model_len = 1030",)),
        ({"data": {"max_prompt_tokens": 0}}, ("data.max_prompt_tokens", "0", "1")),
    ],
)
def test_configurations_that_cannot_run(folder, capsys, sections, texts):
    code, output = train(folder, capsys, **sections)
    check_refused(folder, code, output, *texts)


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here, so asking for it is no fault")
def test_a_tracker_whose_package_is_missing(folder, capsys):
    code, output = train(folder, capsys, logging={"wandb_project": "x"})
    check_refused(folder, code, output, "logging.wandb_project = x", "pip install wandb")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("changes", [{"max_position_embeddings": 16}, {"rope_parameters": LONGROPE}])
def test_data_longer_than_the_models_positions(folder, capsys, changes):
    edit_json("config.json", **changes)(folder)
    code, output = train(folder, capsys)
    check_refused(folder, code, output, "16 positions", "data.max_prompt_tokens", "rollout.max_new_tokens")


def test_a_run_directory_that_cannot_be_made(folder, capsys):
    (folder / "runs").write_text("a file")
    code, output = train(folder, capsys)
    assert code == 2 and "logging.root" in output and "Traceback" not in output


def test_a_configuration_that_is_no_yaml(folder, capsys):
    path = folder / "broken.yaml"
    path.write_text(yaml.safe_dump(runs.base_config(folder)) + "\tx: [")
    assert main(["train", str(path)]) == 2
    assert "broken.yaml" in capsys.readouterr().err
