"""Scores five completions of one prompt against a ground truth, and draws the rewards.

    python examples/reward_functions.py --model HuggingFaceTB/SmolLM2-135M-Instruct --output rewards.png

The reward functions are used one by one, as another trainer would; training itself calls the same ones.
"""

import argparse
import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ebft.core.pooling import normalize_tokens
from openrlhf_ebft.models.feature_network import layer_index
from openrlhf_ebft.rewards import (
    GroupRewards,
    apply_embed_method,
    compute_advantages,
    compute_rewards_from_embeddings,
    extract_hidden_states,
)

PROMPT = "Why is the sky blue? "
TRUTH = "Air molecules scatter short blue wavelengths of sunlight much more strongly than long red ones."
COMPLETIONS = (
    "The air scatters blue light from the sun far more than red light.",
    "Sunlight is scattered by air molecules, and blue light is scattered the most.",
    "The sky is blue because it reflects the color of the ocean.",
    "My favourite recipe for pancakes needs two eggs and some milk.",
    "My favourite recipe for pancakes needs two eggs and some flour.",
)
FRACTIONS = (0.25, 0.5, 0.75)


def embed(model_name: str) -> Tensor:
    """Embeddings (6, 3*H) of the five completions and, last, of the ground truth."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    prompt = tokenizer(PROMPT)["input_ids"]
    rows = [prompt + tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*COMPLETIONS, TRUTH)]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    taps = [layer_index(fraction, model.config.num_hidden_layers) for fraction in FRACTIONS]
    states = normalize_tokens(extract_hidden_states(model, ids, mask, taps), len(taps), "joint")
    return apply_embed_method(states, "completion_mean", mask, torch.full((len(rows),), len(prompt)))


def draw(plain: GroupRewards, whitened: GroupRewards, path: str) -> None:
    """One row of bars per completion, one panel per quantity."""
    panels = (
        ("cosine with the ground truth\n(not whitened)", plain.alignment),
        ("alignment\n(whitened)", whitened.alignment),
        ("reward without whitening", plain.reward),
        ("reward with whitening", whitened.reward),
        ("advantage (rloo, whitened)", compute_advantages(whitened)),
    )
    labels = ["\n".join(textwrap.wrap(text, 40)) for text in COMPLETIONS]
    figure, axes = plt.subplots(1, len(panels), figsize=(17, 4.2), sharey=True, layout="constrained")
    for axis, (title, values) in zip(axes, panels, strict=True):
        bars = axis.barh(labels, values.tolist(), color=["tab:green" if value >= 0 else "tab:red" for value in values])
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.margins(x=0.25)
    axes[0].invert_yaxis()
    figure.suptitle(f"Prompt: {PROMPT.strip()}   Ground truth: {TRUTH}", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name")
    parser.add_argument("--output", default="reward_functions.png", help="picture to write")
    arguments = parser.parse_args()
    embeddings = embed(arguments.model)
    plain = compute_rewards_from_embeddings(embeddings[:-1], embeddings[-1], whitening="none")
    whitened = compute_rewards_from_embeddings(embeddings[:-1], embeddings[-1])
    print(f"{'cosine':>8}{'aligned':>9}{'diverse':>9}{'reward':>8}  completion")
    for row, text in enumerate(COMPLETIONS):
        numbers = [
            values[row].item() for values in (plain.alignment, whitened.alignment, plain.diversity, whitened.reward)
        ]
        print("{:8.3f}{:9.3f}{:9.3f}{:8.3f}  ".format(*numbers) + text)
    print(f"feature-matching loss {plain.cfm.item():.4f}, unbiased {plain.cfm_unbiased.item():.4f}")
    draw(plain, whitened, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
