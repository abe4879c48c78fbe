"""`openrlhf-ebft show-tree CONFIG --out FILE`: draw a small rollout tree of a configuration's data and model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, load_config


def main(argv: Sequence[str]) -> int:
    """Samples the tree and writes the picture; returns the exit code."""
    description = "Draw reference, anchors, branches and attention mask of the first training example's beginning."
    parser = config_parser("openrlhf-ebft show-tree", description, EBFTConfig)
    parser.add_argument("--out", required=True, metavar="FILE", help="picture to write: .html or .png")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of the reference (default 32, or what its first anchor needs)"
    )
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="completions of an anchor (default 2)")
    own, overrides = split_overrides(argv, {"--out": True, "--tokens": True, "--samples": True, "--help": False})
    arguments = parser.parse_args(own)
    config = load_config(arguments.config, overrides)
    from openrlhf_ebft.trainer.tree_example import sample_tree
    from openrlhf_ebft.trainer.tree_picture import write_picture

    tree, tokenizer = sample_tree(config, arguments.tokens, arguments.samples)
    write_picture(tree, tokenizer.decode, Path(arguments.out))
    print(f"{len(tree)} tokens, {tree.num_anchors} anchors, {tree.num_branches} branches in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
