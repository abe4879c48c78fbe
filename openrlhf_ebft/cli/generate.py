"""`openrlhf-ebft generate MODEL PROMPT`: a model's completion of a prompt, on the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import UserError


def main(argv: Sequence[str]) -> int:
    """Prints the completion alone (or, with --with-prompt, after its prompt); returns the exit code."""
    arguments = _parser().parse_args(argv)
    if not arguments.prompt.strip():
        raise UserError("PROMPT is empty: give the text to continue")
    from openrlhf_ebft.distributed.device import local_device
    from openrlhf_ebft.rollouts.text_generation import GenerationSettings, generate_text

    settings = GenerationSettings(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        chat=arguments.chat,
        trust_remote_code=arguments.trust_remote_code,
    )
    completion = generate_text(arguments.model, arguments.prompt, settings, local_device())
    print(arguments.prompt + completion if arguments.with_prompt else completion)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft generate",
        description="Print a model's completion of a prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="model folder such as runs/quickstart/model, .gguf or hub name")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=_length, default=128, metavar="N", help="limit, in tokens")
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="0 takes the likeliest token"
    )
    parser.add_argument("--top-p", type=_mass, default=1.0, metavar="P", help="nucleus mass when sampling; 1 is off")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampler")
    parser.add_argument("--chat", action="store_true", help="put PROMPT into a user turn of the model's chat template")
    parser.add_argument("--with-prompt", action="store_true", help="print PROMPT before its completion")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the model")
    return parser


def _number(text: str, kind: Callable[[str], float], is_allowed: Callable[[float], bool], rule: str) -> float:
    """Returns the number, or makes argparse say the rule."""
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text}: must be {rule}")
    return value


def _length(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "a whole number of at least 1"))


def _temperature(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value < float("inf"), "a finite number of at least 0")


def _mass(text: str) -> float:
    return _number(text, float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


if __name__ == "__main__":
    sys.exit(run_command(main))
