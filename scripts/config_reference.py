#!/usr/bin/env python3
"""Writes docs/configuration.md from the configuration classes: every key, its default, what it takes, its meaning."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from openrlhf_ebft.config.keys import section_class
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.config.sections import EBFTConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/config_reference.py from the configuration classes (`make docs`); changes here are lost. -->

A run is one YAML file. Every key is also a flag with the same spelling, and a flag wins over the file:

```sh
openrlhf-ebft train examples/quickstart.yaml --rollout.temperature 0.8 --policy.max_steps=20
```

`openrlhf-ebft train CONFIG --print-config` checks a configuration and prints it with all defaults; the same text is
saved as `config.yaml` in the run directory. Keys marked **required** have no default. Besides the ranges below, rules
between keys are checked before anything starts; a broken one is reported with the keys, their values and values that
work.
"""

REWARD_INTRODUCTION = """\
# Configuration of train-reward

`openrlhf-ebft train-reward CONFIG` reads a file of its own, by the same rules.
"""


def main() -> int:
    """Writes the page, or with --check says whether it is up to date (exit code 1 if not)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    arguments = parser.parse_args()
    page = render_page()
    if not arguments.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} is out of date: run make docs", file=sys.stderr)
    return 1


def render_page() -> str:
    """Returns the whole page."""
    parts = [INTRODUCTION, *render_model(EBFTConfig), REWARD_INTRODUCTION, *render_model(RewardConfig)]
    return "\n".join(parts)


def render_model(model: type[BaseModel]) -> list[str]:
    """Returns a table of the keys outside of sections, then a heading and a table for each section."""
    schema = model.model_json_schema()
    properties, definitions = schema["properties"], schema["$defs"]
    sections = {name: found for name, field in model.model_fields.items() if (found := section_class(field))}
    plain = {name: field for name, field in model.model_fields.items() if name not in sections}
    parts = [render_table({name: (field, properties[name]) for name, field in plain.items()})]
    for name, section in sections.items():
        own = definitions[section.__name__]["properties"]
        rows = {f"{name}.{key}": (field, own[key]) for key, field in section.model_fields.items()}
        parts.append(f"## {name}\n\n{inspect.getdoc(section)}\n")
        parts.append(render_table(rows))
    return parts


def render_table(rows: dict[str, tuple[FieldInfo, dict[str, Any]]]) -> str:
    """Returns a Markdown table; `rows` maps key paths to the field and its JSON schema."""
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for key, (field, schema) in rows.items():
        default = "**required**" if field.is_required() else f"`{json.dumps(field.default)}`"
        if field.description is None:
            raise ValueError(f"{key} has no description")
        lines.append(f"| `{key}` | {default} | {allowed(schema)} | {field.description.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def allowed(schema: dict[str, Any]) -> str:
    """Returns in words what a field's JSON schema admits."""
    if "anyOf" in schema:
        return ", ".join(allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "null":
        return "`null`"
    if schema.get("type") == "array":
        return describe_list(schema)
    if "pattern" in schema:
        return f"text matching `{schema['pattern']}`"
    bounds = [template.format(f"{schema[name]:.12g}") for name, template in BOUNDS.items() if name in schema]
    return " ".join([KINDS[schema["type"]], " and ".join(bounds)]).rstrip()


def describe_list(schema: dict[str, Any]) -> str:
    """Returns in words what a list takes."""
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: each {allowed(schema['prefixItems'][0])}"
    return f"list of {schema.get('minItems', 0)} or more: each {allowed(schema['items'])}"


if __name__ == "__main__":
    sys.exit(main())
