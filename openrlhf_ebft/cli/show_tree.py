"""`openrlhf-ebft show-tree CONFIG --out FILE`: draw a small rollout tree of a configuration's data and model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, load_config
from openrlhf_ebft.config.errors import UserError


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
    out = _picture_file(arguments.out)
    from openrlhf_ebft.trainer.tree_example import sample_tree
    from openrlhf_ebft.trainer.tree_picture import write_picture

    tree, tokenizer = sample_tree(config, arguments.tokens, arguments.samples)
    write_picture(tree, tokenizer.decode, out)
    print(f"{len(tree)} tokens, {tree.num_anchors} anchors, {tree.num_branches} branches in {out}")
    return 0


def _picture_file(text: str) -> Path:
    """Where the picture goes, checked before a model is loaded."""
    out = Path(text)
    if out.suffix not in (".html", ".png"):
        raise UserError(f"--out {out}: must end in .html or .png")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    return out


if __name__ == "__main__":
    sys.exit(run_command(main))
