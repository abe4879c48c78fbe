"""`openrlhf-ebft import-config FILE`: configurations of other EBFT trainers as this one's."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.importing import ImportedConfig, import_config
from openrlhf_ebft.config.importing.translation import KeyNote
from openrlhf_ebft.config.rules import list_notes
from openrlhf_ebft.config.yaml_io import dump_yaml

# Keys of other trainers whose text may be a secret: it must not come into terminals and logs.
_SECRET = re.compile(r"^use_wandb$|(api|access|auth|hf|hub|wandb)_?(key|token)|secret|password")


def main(argv: Sequence[str]) -> int:
    """Writes the configurations and prints what became of every key; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft import-config",
        description="Turn a configuration of the EBFT authors' trainer (flat keys, with or without a sweep) or of "
        "Axolotl (rl: ebft) into this one's, and say what became of every key.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML file to read")
    parser.add_argument(
        "--out", metavar="PATH", type=Path, help="file, or for a sweep folder, to write; default: print the YAML"
    )
    arguments = parser.parse_args(argv)
    imported = import_config(arguments.file)
    shared = imported[0].notes
    for line in _account(shared):
        print(line, file=sys.stderr)
    for config in imported[1:]:
        extra = [note for note in config.notes if note not in shared]
        for line in _account(extra, heading=f"\n{config.name}, where different:") if extra else ():
            print(line, file=sys.stderr)
    for note in list_notes(imported[0].config):
        print(f"note: {note}", file=sys.stderr)
    _write(imported, arguments.out)
    return 0


def _account(notes: Sequence[KeyNote], heading: str = "") -> list[str]:
    """One line a key, grouped by what became of it."""
    lines = [heading] if heading else []
    for action in ("mapped", "changed", "dropped"):
        group = [note for note in notes if note.action == action]
        lines += [f"{action} ({len(group)}):"] if group else []
        for note in group:
            arrow = f" -> {', '.join(note.targets)}" if note.targets else ""
            why = f"  [{note.why}]" if note.why else ""
            hidden = isinstance(note.value, str) and _SECRET.search(note.key.lower())
            lines.append(f"  {note.key} = {'(not shown)' if hidden else note.value}{arrow}{why}")
    return lines


def _write(imported: Sequence[ImportedConfig], out: Path | None) -> None:
    texts = [dump_yaml(config.data) for config in imported]
    if out is None:
        print("\n---\n".join(text.rstrip() for text in texts))
        return
    if len(imported) == 1 and not out.is_dir():
        targets = [out]
    else:
        out.mkdir(parents=True, exist_ok=True)
        targets = [out / f"{config.name}.yaml" for config in imported]
    if len(set(targets)) < len(targets):
        raise UserError("two points of the sweep have the same values: remove one")
    for target, text in zip(targets, texts, strict=True):
        if target.exists():
            raise UserError(f"{target} exists: choose another --out")
        target.write_text(text, encoding="utf-8")
    print("\n".join(str(target) for target in targets))


if __name__ == "__main__":
    sys.exit(run_command(main))
