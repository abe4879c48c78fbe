"""Which differences between a checkpoint's configuration and the present one are allowed, noted or refused."""

from dataclasses import replace

import pytest

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.config_changes import check_changes
from openrlhf_ebft.trainer.manifests import Manifest
from openrlhf_ebft.trainer.state import TrainerState


def make_config(**sections) -> EBFTConfig:
    return EBFTConfig(name="run", model={"path": "m"}, data={"path": "d"}, **sections)


def saved(**sections) -> Manifest:
    return Manifest.of(TrainerState(step=4), make_config(**sections), {}, "")


def test_the_same_configuration_needs_no_word():
    assert check_changes(saved(), make_config(), allow=False) == []


def test_what_changes_no_result_is_noted_and_taken():
    new = make_config(placement={"threads_per_actor": 4}, checkpoint={"keep_last": 5}, policy={"timeout_s": 60.0})
    notes = check_changes(saved(), new, allow=False)
    assert "changed: checkpoint.keep_last: 2 in the checkpoint, now 5" in notes and len(notes) == 3


def test_what_changes_results_is_listed_with_both_values():
    new = make_config(seed=5)
    with pytest.raises(UserError, match=r"--allow-config-change.*\n  seed: 0 in the checkpoint, now 5"):
        check_changes(saved(), new, allow=False)
    assert check_changes(saved(), new, allow=True) == ["changed: seed: 0 in the checkpoint, now 5"]


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"policy": {"num_ranks": 2}}, "policy.num_ranks: 1 in the checkpoint, now 2"),
        ({"deepspeed": {"zero_stage": 2}}, "deepspeed.zero_stage: 0 in the checkpoint, now 2"),
    ],
)
def test_another_layout_is_refused_by_name_even_when_changes_are_allowed(sections, line):
    with pytest.raises(UserError, match=f"cannot be used with these changes:\n  {line}"):
        check_changes(saved(), make_config(**sections), allow=True)


def test_other_library_versions_are_a_warning():
    manifest = replace(saved(), libraries={**saved().libraries, "torch": "1.0"})
    (note,) = check_changes(manifest, make_config(), allow=False)
    assert note.startswith("warning: the checkpoint was written with torch 1.0, this is ")


def test_a_key_that_the_checkpoint_does_not_know_counts_as_a_difference():
    manifest = saved()
    del manifest.config["policy"]["ce_coef"]
    with pytest.raises(UserError, match="policy.ce_coef: None in the checkpoint, now 0.03"):
        check_changes(manifest, make_config(), allow=False)
