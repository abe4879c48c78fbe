"""Strided EBFT on one document: this package against the straightforward way, same tokens, same model.

The straightforward way is that of the public implementations: n copies of the document, the whole sequence run again
for every generated token, one dense mask built by loops, the vocabulary head on every position. Every measurement runs
in a process of its own; seconds are CPU seconds of all threads (best of --repeats), so that other work on the machine
does not enter. The package's sampler packs weights that have served eight forward passes, so its best of three calls
is one between two weight syncs of a run. Peak memory is that of the process above the loaded model. Features and
log-probabilities are those of completions that the model has sampled. A step is the sum of its parts: rewards of these
groups take milliseconds (`whitening.py`).

    python benchmarks/strided.py --model models/SmolLM2-135M-Instruct --lengths 256 512 --dtypes float32 bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.anchors import StrideSettings, answer_anchors
from openrlhf_ebft.core.experience import Completion, Reference, Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.pooling import normalize_tokens
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import completion_seed
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.feature_network import layer_index, load_feature_network
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms

SETTINGS = StrideSettings(stride=8, context_length=8, generate_max_len=8)
SAMPLES, STEPS, TEMPERATURE = 4, 8, 0.6
FRACTIONS = (0.25, 0.5, 0.75)
SAMPLING = SamplingSettings(temperature=TEMPERATURE, top_p=1.0, top_k=0, stop_token_ids=())
PARTS = ("sample", "features", "logprobs")
WAYS = ("straightforward", "ours")


def document(path: str, size: int) -> Reference:
    """The first `size` tokens of a module of the standard library, with its anchors."""
    ids = AutoTokenizer.from_pretrained(path)(Path(dataclasses.__file__).read_text(encoding="utf-8"))["input_ids"]
    mask = torch.ones(size, dtype=torch.bool)
    anchors = answer_anchors(mask, None, SETTINGS)
    windows = torch.full_like(anchors, STEPS)
    return Reference("document", torch.tensor(ids[:size]), anchors, windows, windows.clone(), mask)


class Straightforward:
    """n copies of the document, step-major blocks behind each, as the public implementations lay them out."""

    def __init__(self, model: PreTrainedModel, reference: Reference) -> None:
        self.model = model
        self.reference = reference
        self.size, self.blocks = reference.token_ids.numel(), reference.anchors.numel()

    def mask_and_positions(self, steps: int) -> tuple[Tensor, Tensor]:
        """(n, 1, T, T) bool and (n, T) for `steps` generated tokens of every block, built token by token."""
        size, blocks = self.size, self.blocks
        total = size + steps * blocks
        mask = torch.zeros(total, total, dtype=torch.bool)
        positions = list(range(size))
        for row in range(size):
            mask[row, : row + 1] = True
        for step in range(steps):
            for block in range(blocks):
                row = size + step * blocks + block
                anchor = int(self.reference.anchors[block])
                mask[row, :anchor] = True
                for earlier in range(step + 1):
                    mask[row, size + earlier * blocks + block] = True
                positions.append(anchor + step)
        return mask.expand(SAMPLES, 1, -1, -1), torch.tensor(positions).expand(SAMPLES, -1)

    def predictors(self, step: int) -> Tensor:
        if step == 0:
            return self.reference.anchors - 1
        return self.size + (step - 1) * self.blocks + torch.arange(self.blocks)

    @torch.no_grad()
    def sample(self) -> Tensor:
        """(n, blocks, steps) tokens."""
        seeds = [completion_seed(0, block, j) for j in range(SAMPLES) for block in range(self.blocks)]
        uniforms = draw_uniforms(seeds, STEPS)
        ids = self.reference.token_ids.expand(SAMPLES, -1)
        for step in range(STEPS):
            mask, positions = self.mask_and_positions(step)
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            rows = logits[:, self.predictors(step)].flatten(0, 1)
            picked, _ = draw_tokens(rows, uniforms[:, step], SAMPLING)
            ids = torch.cat([ids, picked.view(SAMPLES, self.blocks)], dim=1)
        return ids[:, self.size :].view(SAMPLES, STEPS, self.blocks).transpose(1, 2)

    def whole(self, tokens: Tensor) -> Tensor:
        generated = tokens.transpose(1, 2).flatten(1)
        return torch.cat([self.reference.token_ids.expand(SAMPLES, -1), generated], dim=1)

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """Inner products (blocks, n+1, n+1) of the last tokens' features."""
        mask, positions = self.mask_and_positions(STEPS)
        states = self.model(
            input_ids=self.whole(tokens),
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states
        layers = [layer_index(f, self.model.config.num_hidden_layers) for f in FRACTIONS]
        joined = normalize_tokens(torch.cat([states[i] for i in layers], -1).float(), len(layers), "joint")
        generated = joined[:, self.size + (STEPS - 1) * self.blocks :].transpose(0, 1)
        return group_gram(generated, joined[0, self.reference.anchors + STEPS - 1])

    def loss(self, tokens: Tensor, advantages: Tensor) -> Tensor:
        """advantages (blocks, n)."""
        mask, positions = self.mask_and_positions(STEPS)
        ids = self.whole(tokens)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
        places = torch.cat([self.predictors(step) for step in range(STEPS)])
        chosen = torch.log_softmax(logits / TEMPERATURE, -1)[:, places].gather(2, ids[:, self.size :, None])[..., 0]
        rl = -(chosen.view(SAMPLES, STEPS, self.blocks).mean(1) * advantages.T).mean()
        known = torch.log_softmax(logits, -1)[0, : self.size - 1].gather(1, ids[0, 1 : self.size, None])
        return rl - 0.03 * known.mean()


class Ours:
    """The package's own sampler, feature network and policy."""

    def __init__(
        self, model: PreTrainedModel, reference: Reference, features: TreeFeatures | None, chunk_tokens: int
    ) -> None:
        self.reference = reference
        self._sampler = BlockParallelSampler(model)
        self._policy = PolicyModel(
            model, "split", temperature=TEMPERATURE, chunk_tokens=chunk_tokens, with_entropy=False
        )
        self._features = features

    def sample(self) -> Tensor:
        groups = self._sampler.sample([RolloutRequest(self.reference, SAMPLES, seed=0)], SAMPLING)
        return torch.tensor([[c.token_ids for c in group] for group in groups]).transpose(0, 1)

    def tree(self, tokens: Tensor) -> RolloutTree:
        groups = tuple(
            tuple(Completion(tuple(ids), (0.0,) * STEPS, "length") for ids in group)
            for group in tokens.transpose(0, 1).tolist()
        )
        return RolloutTree.from_rollout(self.reference, Rollout("document", groups, 0))

    def features(self, tokens: Tensor) -> Tensor:
        assert self._features is not None
        return self._features.group_grams([self.tree(tokens)])[0]

    def loss(self, tokens: Tensor, advantages: Tensor) -> Tensor:
        batch = TreeBatch.collate([self.tree(tokens)])
        output = self._policy(batch)
        rl = -(output.branch * batch.spread([advantages])).mean()
        return rl - 0.03 * output.supervised.mean()


CLOCKS = {"process": time.process_time, "wall": time.perf_counter}


def timed(clock: str, repeats: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        start = CLOCKS[clock]()
        work()
        times.append(CLOCKS[clock]() - start)
    return min(times)


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One part, one way, in this process."""
    part, way, size = arguments.part, arguments.way, arguments.lengths[0]
    dtype = DTYPES[arguments.dtypes[0]]
    torch.set_num_threads(arguments.threads)
    reference = document(arguments.model, size)
    load = AutoModelForCausalLM.from_pretrained if way == "straightforward" else load_causal_lm
    model = load(arguments.model, dtype=dtype).eval()
    features = None
    if way == "ours" and part == "features":
        network = load_feature_network(arguments.model, FRACTIONS, dtype)
        config = FeatureConfig(embed_method="last_token", whitening="none")
        features = TreeFeatures(network, config, special_ids=(), mode="split")
    runner: Ours | Straightforward = Straightforward(model, reference)
    if way == "ours":
        runner = Ours(model, reference, features, arguments.chunk_tokens)
    tokens = sampled_tokens(Path(arguments.tokens), model, reference)
    advantages = torch.randn(len(reference.anchors), SAMPLES, generator=torch.Generator().manual_seed(0))
    checks: dict[str, float] = {}

    def backward(made: Tensor, weights: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss = runner.loss(made, weights)
        loss.backward()
        checks["value"] = float(loss.detach())

    def sample() -> None:
        checks["value"] = float((runner.sample() * torch.arange(1, STEPS + 1)).sum())

    def embed() -> None:
        checks["value"] = float(runner.features(tokens).sum())

    work = {"sample": sample, "features": embed, "logprobs": lambda: backward(tokens, advantages)}[part]
    before = reset_peak()
    seconds = timed(arguments.clock, arguments.repeats, work)
    return {"seconds": seconds, "peak_mib": memory_mib("VmHWM") - before, **checks}


def sampled_tokens(path: Path, model: PreTrainedModel, reference: Reference) -> Tensor:
    """(n, blocks, steps) completions of the model; the first process samples them, the others read its file."""
    if not path.exists():
        groups = BlockParallelSampler(model).sample([RolloutRequest(reference, SAMPLES, seed=0)], SAMPLING)
        path.write_text(json.dumps([[c.token_ids for c in group] for group in groups]), encoding="utf-8")
    return torch.tensor(json.loads(path.read_text(encoding="utf-8"))).transpose(0, 1)


def reset_peak() -> float:
    """Sets this process's peak memory to what it holds now (Linux), in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def memory_mib(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens whose logits the package has at one time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="calls of each part; the best counts")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="process", help="CPU seconds, or wall seconds")
    parser.add_argument("--part", choices=PARTS, help="measure this part in this process and print JSON")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--tokens", help="file with the completions, with --part")
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(measure(arguments)))
        return
    print(f"{'part':<9} {'S':>4} {'dtype':<9} {'straightforward':>22} {'ours':>22} {'ratio':>6}  check", flush=True)
    for size in arguments.lengths:
        for dtype in arguments.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                tokens = Path(folder) / "tokens.json"
                results = {
                    (p, w): run_child(arguments, p, w, size, dtype, tokens) for p in arguments.parts for w in WAYS
                }
            for part in arguments.parts:
                print_row(part, size, dtype, [results[part, way] for way in WAYS])
            if len(arguments.parts) == len(PARTS):
                whole = []
                for way in WAYS:
                    parts = [results[part, way] for part in PARTS]
                    peak = max(part["peak_mib"] for part in parts)
                    whole.append({"seconds": sum(part["seconds"] for part in parts), "peak_mib": peak})
                print_row("step", size, dtype, whole)


def print_row(part: str, size: int, dtype: str, results: list[dict[str, float]]) -> None:
    cells = [f"{result['seconds']:.2f} s, {result['peak_mib']:.0f} MiB" for result in results]
    values = ", ".join(f"{result['value']:.6g}" for result in results if "value" in result)
    ratio = results[0]["seconds"] / results[1]["seconds"]
    print(f"{part:<9} {size:>4} {dtype:<9} {cells[0]:>22} {cells[1]:>22} {ratio:>6.1f}  {values}", flush=True)


def run_child(
    arguments: argparse.Namespace, part: str, way: str, size: int, dtype: str, tokens: Path
) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", arguments.model, "--part", part, "--way", way]
    command += ["--tokens", str(tokens)]
    command += ["--lengths", str(size), "--dtypes", dtype, "--threads", str(arguments.threads)]
    command += ["--repeats", str(arguments.repeats), "--clock", arguments.clock]
    command += ["--chunk-tokens", str(arguments.chunk_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
