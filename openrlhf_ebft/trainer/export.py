"""Models out of runs and checkpoints: adapters as they are, or merged into a plain Hugging Face model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config import EBFTConfig
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.tokenizers import load_run_tokenizer, load_tokenizer
from openrlhf_ebft.distributed.checkpoint_weights import ADAPTER_FOLDER, save_checkpoint_model
from openrlhf_ebft.models.loading import DTYPES
from openrlhf_ebft.models.lora import adapter_base, is_adapter_folder, load_merged
from openrlhf_ebft.trainer.checkpoints import TRAINER, CheckpointStore
from openrlhf_ebft.trainer.manifests import MANIFEST, DamagedCheckpoint, check_files, read_manifest
from openrlhf_ebft.trainer.run_directory import PARTIAL, RunDirectory, written_aside

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is exported: a model or adapter folder, or what the trainer wrote into a checkpoint."""

    folder: Path
    config: EBFTConfig | None  # of the checkpoint's run; None: a folder as a run leaves it
    is_adapter: bool
    averaged: bool = False  # of a checkpoint: the moving average of the weights


def export_model(source: Path, out: Path, *, merge: bool, dtype: str | None, say: Say, averaged: bool = False) -> None:
    """Writes `out`, complete or not at all.

    Args:
        source: run directory (its final model, else its newest complete checkpoint), checkpoint, model or adapters.
        out: folder to make; may exist when it is empty.
        merge: put adapters into the base model's weights, which gives a plain model.
        dtype: of a merged model's weights; None: that of the base model's files.
        say: takes a line about what is exported.
        averaged: export the moving average of the weights (policy.ema_decay) instead.
    Raises:
        UserError: `source` holds nothing to export or is damaged, `out` is taken, or adapters do not fit their base.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists: choose another --out, or remove it")
    found = find_source(source, say, averaged=averaged)
    try:
        with written_aside(out) as aside:
            _write(found, aside, merge=merge, dtype=dtype)
    except (ValueError, FileNotFoundError) as error:
        shutil.rmtree(out.with_name(out.name + PARTIAL), ignore_errors=True)
        raise UserError(str(error)) from error


def find_source(source: Path, say: Say, *, averaged: bool = False) -> Source:
    """Finds what `export_model` exports. Raises UserError."""
    if (source / MANIFEST).is_file():
        return _of_checkpoint(source, averaged)
    run = RunDirectory(source)
    if run.config.is_file():
        model = run.averaged_model if averaged else run.model
        if model.is_dir():
            say(f"the final model of {source}{' (averaged weights)' if averaged else ''}")
            return Source(model, None, is_adapter_folder(model))
        config = run.saved_config()
        checkpoint = CheckpointStore(run.checkpoints, config, say).newest()
        if checkpoint is None:
            raise UserError(f"{source} holds neither a final model nor a complete checkpoint")
        say(f"{checkpoint.path}: the run has no final {'averaged ' if averaged else ''}model")
        return _of_checkpoint(checkpoint.path, averaged)
    if averaged:
        raise UserError(f"{source}: averaged weights are in run directories and checkpoints alone")
    if is_adapter_folder(source) or (source / "config.json").is_file():
        return Source(source, None, is_adapter_folder(source))
    raise UserError(f"{source}: is no run directory, checkpoint, model or adapter folder")


def _of_checkpoint(path: Path, averaged: bool) -> Source:
    try:
        check_files(path)
        config = EBFTConfig.model_validate(read_manifest(path).config)
    except DamagedCheckpoint as error:
        raise UserError(f"{path}: {error}") from None
    if averaged and (config.policy.ema_decay is None or config.lora.is_on):
        cause = (
            "averages adapters; set policy.export_ema, then its run writes them"
            if config.lora.is_on
            else ("was written without policy.ema_decay: there are no averaged weights")
        )
        raise UserError(f"{path} {cause}")
    if config.lora.is_on:
        return Source(path / TRAINER / ADAPTER_FOLDER, config, True)
    return Source(path / TRAINER, config, False, averaged)


def _write(source: Source, out: Path, *, merge: bool, dtype: str | None) -> None:
    if source.is_adapter and merge:
        trusted = source.config is not None and source.config.model.trust_remote_code
        model = load_merged(source.folder, dtype=DTYPES[dtype] if dtype else "auto", trust_remote_code=trusted)
        model.save_pretrained(out)
        _tokenizer_of(source).save_pretrained(out)
        return
    if source.config is not None and not source.is_adapter:
        save_checkpoint_model(source.folder, source.config, out, averaged=source.averaged)
    else:
        shutil.copytree(source.folder, out, dirs_exist_ok=True)
    if source.config is not None:
        load_run_tokenizer(source.config).save_pretrained(out)


def _tokenizer_of(source: Source) -> PreTrainedTokenizerBase:
    if source.config is not None:
        return load_run_tokenizer(source.config)
    try:
        return load_tokenizer(str(source.folder))
    except DataError:  # adapters alone, without a tokenizer beside them
        return load_tokenizer(adapter_base(source.folder))


@contextmanager
def whole_model(path: str, say: Say) -> Iterator[str]:
    """Yields `path`, or for adapters a temporary folder with the merged model, which every engine loads."""
    if not is_adapter_folder(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ebft-merged-") as folder:
        say(f"merging the adapters of {path} into a temporary model")
        merged = Path(folder) / "model"
        export_model(Path(path), merged, merge=True, dtype=None, say=say)
        yield str(merged)
