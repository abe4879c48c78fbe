"""Does reward-augmented decoding steer? Movie sentences rated by people, SmolLM2, an independent judge.

    pip download --no-deps --no-binary :all: --no-build-isolation vaderSentiment==2.5     # the rated sentences
    pip install vaderSentiment==3.3.2                                                     # the judge
    python benchmarks/rad_sentiment.py prepare vaderSentiment-2.5.tar.gz MODEL_FOLDER WORK
    openrlhf-ebft train-reward examples/rad_sentiment.yaml
    python benchmarks/rad_sentiment.py steer MODEL_FOLDER WORK/reward WORK/steering.json
    python benchmarks/rad_sentiment.py report WORK/steering.json WORK/steering.png

`prepare` writes the sentences and the first blocks of the model as the reward model's backbone. `steer` continues 100
neutral prompts for every beta, both directions and three seeds. `report` prints the table and draws the plot.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import statistics
import tarfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.rad import RAD

SENTENCES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RATINGS = "additional_resources/hutto_ICWSM_2014.tar.gz"
HELD_OUT_SHARE = 0.1
BETAS = (0.0, 5.0, 10.0, 20.0, 50.0)
SEEDS = (0, 1, 2)
NEW_TOKENS = 24
SUBJECTS = (
    *("The movie", "This film", "The book", "The restaurant", "The hotel", "My neighbour", "The new phone"),
    *("The concert", "The lecture", "The city", "The weather today", "The play", "Her speech", "The game"),
    *("The report", "The train ride", "The museum", "The song", "His garden", "The meeting"),
)
OPENINGS = (" is", " was", " turned out to be", " seemed", " could be described as")


def prompts() -> list[str]:
    """The 100 neutral prompts."""
    return [subject + opening for subject in SUBJECTS for opening in OPENINGS]


def read_sentences(archive: str) -> list[tuple[str, float]]:
    """(sentence, mean human rating from -4 to 4) from the downloaded archive of vaderSentiment 2.5.

    Raises:
        ValueError: the archive does not hold the rated sentences.
    """
    with tarfile.open(archive) as outer:
        inner = next((name for name in outer.getnames() if name.endswith(RATINGS)), None)
        if inner is None:
            raise ValueError(f"{archive} holds no {RATINGS}; download the source archive of vaderSentiment 2.5")
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(inner).read())) as rated:
            text = rated.extractfile(SENTENCES).read().decode("utf-8")
    rows = [line.split("\t", 2) for line in text.splitlines() if line.strip()]
    return [(sentence.strip(), float(rating)) for _, rating, sentence in rows if sentence.strip()]


def prepare(archive: str, model: str, work: str, layers: int) -> None:
    """Write train.jsonl and held_out.jsonl (split by a hash of the sentence) and the reward model's backbone."""
    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: [] for name in ("train", "held_out")}
    for sentence, rating in read_sentences(archive):
        share = int(hashlib.sha256(sentence.encode()).hexdigest()[:8], 16) / 16**8
        files["held_out" if share < HELD_OUT_SHARE else "train"].append(
            json.dumps({"text": sentence, "rating": rating})
        )
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{name}: {len(rows)} sentences")
    backbone = AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=layers)
    backbone.save_pretrained(folder / "backbone")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "backbone")


def steer(model: str, reward: str, output: str, batch_size: int) -> None:
    """Generate every cell and write its measures after each, so that an interrupted run goes on."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rad = RAD(
        beta=0.0,
        reward_model_id=reward,
        reward_model_kwargs={"dtype": torch.bfloat16},
        score_transform="sigmoid",
    )
    rad.steer(lm, tokenizer)
    path = Path(output)
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["beta"], row["invert"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for beta in BETAS:
            for invert in (False, True) if beta else (False,):
                if (beta, invert, seed) in done:
                    continue
                call = rad.clone_for_call()
                call.beta, call.invert = beta, invert
                texts = continue_prompts(lm, tokenizer, call, seed, batch_size)
                rows.append({"beta": beta, "invert": invert, "seed": seed, **measure(lm, tokenizer, texts)})
                path.write_text(json.dumps(rows, indent=1))
                print({key: value for key, value in rows[-1].items() if key != "examples"}, flush=True)


def continue_prompts(lm, tokenizer, rad: RAD, seed: int, batch_size: int) -> list[tuple[str, str]]:
    """(prompt, continuation) of the 100 prompts, sampled."""
    torch.manual_seed(seed)
    pairs = []
    for start in range(0, len(prompts()), batch_size):
        batch = prompts()[start : start + batch_size]
        inputs = tokenizer(batch, return_tensors="pt", padding=True).to(lm.device)
        processors = rad.get_logits_processors(inputs.input_ids, {}, attention_mask=inputs.attention_mask)
        out = lm.generate(
            **inputs,
            do_sample=True,
            top_k=None,
            top_p=None,
            temperature=1.0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=processors,
        )
        new = tokenizer.batch_decode(out[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
        pairs += list(zip(batch, new, strict=True))
    return pairs


def measure(lm, tokenizer, pairs: list[tuple[str, str]]) -> dict:
    """Judge's mean score of the texts, perplexity of the continuations under the unsteered model, distinct-3."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    judge = SentimentIntensityAnalyzer()
    scores = [judge.polarity_scores(prompt + new)["compound"] for prompt, new in pairs]
    nats, tokens = 0.0, 0
    for prompt, new in pairs:
        skip = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt)["input_ids"] + tokenizer(new)["input_ids"]], device=lm.device)
        if ids.size(1) == skip:
            continue
        with torch.inference_mode():
            logprobs = lm(ids).logits.float().log_softmax(-1)[0, skip - 1 : -1]
        nats -= float(logprobs.gather(1, ids[0, skip:, None]).sum())
        tokens += ids.size(1) - skip
    words = [new.split() for _, new in pairs]
    triples = [tuple(row[i : i + 3]) for row in words for i in range(len(row) - 2)]
    return {
        "judge": statistics.mean(scores),
        "perplexity": math.exp(nats / tokens),
        "distinct_3": len(set(triples)) / len(triples),
        "examples": [prompt + new for prompt, new in pairs[:3]],
    }


def report(source: str, picture: str) -> None:
    """Print a Markdown table (mean and sample standard deviation over seeds) and draw steering against fluency."""
    from matplotlib.figure import Figure

    rows = json.loads(Path(source).read_text())
    cells = {}
    for row in rows:
        cells.setdefault((-row["beta"] if row["invert"] else row["beta"]), []).append(row)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    print("| direction | beta | judge's mean score | perplexity | distinct-3 | seeds |\n|---|---|---|---|---|---|")
    means = {}
    for signed in sorted(cells):
        summary = {}
        for name in ("judge", "perplexity", "distinct_3"):
            values = [row[name] for row in cells[signed]]
            summary[name] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))
        means[signed] = summary
        direction = "none" if signed == 0 else "negative (invert)" if signed < 0 else "positive"
        judge, perplexity, distinct = (f"{mean:.3g} ± {deviation:.2g}" for mean, deviation in summary.values())
        print(f"| {direction} | {abs(signed):g} | {judge} | {perplexity} | {distinct} | {len(cells[signed])} |")
    for axes, name, label in (
        (left, "perplexity", "perplexity under the unsteered model"),
        (right, "distinct_3", "distinct-3"),
    ):
        for signed, summary in means.items():
            colour = "tab:grey" if signed == 0 else "tab:red" if signed < 0 else "tab:blue"
            (x, x_dev), (y, y_dev) = summary["judge"], summary[name]
            axes.errorbar(x, y, xerr=x_dev, yerr=y_dev, marker="o", color=colour, capsize=2)
            axes.annotate(f"{abs(signed):g}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.set(xlabel="judge's mean score (-1 to 1)", ylabel=label)
        axes.grid(alpha=0.3)
    left.set_title("grey: beta 0; blue: towards positive; red: inverted", fontsize=9)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, names in (
        (prepare, ("archive", "model", "work")),
        (steer, ("model", "reward", "output")),
        (report, ("source", "picture")),
    ):
        command = commands.add_parser(function.__name__)
        for name in names:
            command.add_argument(name)
        command.set_defaults(run=function)
        if function is prepare:
            command.add_argument("--layers", type=int, default=6, help="blocks of the reward model's backbone")
        if function is steer:
            command.add_argument("--batch-size", type=int, default=50)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()
