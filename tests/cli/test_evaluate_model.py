"""`evaluate` with another model than the configuration's: no adapters are put on it, features stay where they were."""

from openrlhf_ebft.cli.evaluate import _of_another_model
from openrlhf_ebft.config.sections import EBFTConfig


def test_a_run_with_adapters_is_measured_as_a_plain_model_with_the_features_of_its_base():
    config = EBFTConfig(
        name="run",
        model={"path": "base", "dtype": "float32"},
        data={"path": "d"},
        lora={"rank": 4, "sync": "adapter"},
        features={"source": "policy_base"},
    )
    other = _of_another_model(config, "runs/run/merged")
    assert other.model.path == "runs/run/merged"
    assert (other.features.path, other.features.dtype) == ("base", "float32")
    assert other.has_feature_actors and not config.has_feature_actors
    assert not other.lora.is_on and not other.lora.sends_adapters
