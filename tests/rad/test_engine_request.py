"""RAD arguments of a request and the engine's configuration: every fault is a ValueError that names the argument."""

from __future__ import annotations

import math

import pytest

from openrlhf_ebft.rad.engine.config import RADEngineConfig
from openrlhf_ebft.rad.engine.request import RADRequest, Term, to_extra_args

TWO = {"reward_models": {"kind": {"path": "a"}, "toxic": {"path": "b"}}, "default": "kind"}


def test_no_rad_argument_means_no_rad():
    assert RADRequest.from_extra_args({5: 1}) is None
    assert RADRequest.from_extra_args(None) is None
    assert RADRequest.from_extra_args({"kv_transfer_params": 1}) is None


def test_all_arguments():
    flat = {
        "rad_beta": 10,
        "rad_top_k": 5,
        "rad_invert": 1,
        "rad_score_index": 2,
        "rad_score_transform": "sigmoid",
        "rad_reward_model": "kind",
        "rad_trace": "t",
        "other": 3,
    }
    request = RADRequest.from_extra_args(flat)
    assert request == RADRequest(10.0, 5, True, 2, "sigmoid", "kind", (), "t")
    assert request.terms() == (Term("kind", 10.0, True),)
    assert RADRequest.from_extra_args({"rad_beta": 0}).top_k == 20


def test_weights_are_terms_and_a_negative_one_inverts():
    request = RADRequest.from_extra_args({"rad_weights": ["kind=10", "toxic=-2.5"], "rad_beta": 2})
    assert request.terms() == (Term("kind", 20.0, False), Term("toxic", 5.0, True))
    assert RADRequest.from_extra_args({"rad_weights": ["a=b=1"]}).weights == (("a=b", 1.0),)
    assert RADRequest.from_extra_args({"rad_weights": ["kind=1"]}).beta == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rad_betta": 1}, "unknown RAD argument 'rad_betta'; known are rad_beta, rad_top_k"),
        ({"rad_top_k": 5}, "rad_beta is missing"),
        ({"rad_beta": "10"}, "rad_beta must be a number, got '10'"),
        ({"rad_beta": True}, "rad_beta must be a number"),
        ({"rad_beta": None}, "rad_beta must be a number"),
        ({"rad_beta": -1}, "rad_beta must be >= 0, got -1; use rad_invert"),
        ({"rad_beta": math.nan}, "rad_beta must be finite"),
        ({"rad_beta": math.inf}, "rad_beta must be finite"),
        ({"rad_beta": 10**400}, "rad_beta must be finite, got a huge whole number"),
        ({"rad_beta": 1, "rad_top_k": 0}, "rad_top_k must be a whole number >= 1, got 0"),
        ({"rad_beta": 1, "rad_top_k": 2.0}, "rad_top_k must be a whole number"),
        ({"rad_beta": 1, "rad_top_k": True}, "rad_top_k must be a whole number"),
        ({"rad_beta": 1, "rad_invert": 2}, "rad_invert must be true or false, got 2"),
        ({"rad_beta": 1, "rad_invert": "yes"}, "rad_invert must be true or false"),
        ({"rad_beta": 1, "rad_score_index": -1}, "rad_score_index must be a whole number >= 0"),
        ({"rad_beta": 1, "rad_score_transform": "tanh"}, "rad_score_transform must be one of none, sigmoid, softmax"),
        ({"rad_beta": 1, "rad_score_transform": ["sigmoid"]}, "rad_score_transform must be one of"),
        ({"rad_beta": 1, "rad_reward_model": ""}, "rad_reward_model must be a text of 1 to 256"),
        ({"rad_beta": 1, "rad_reward_model": 7}, "rad_reward_model must be a text"),
        ({"rad_beta": 1, "rad_trace": "x" * 300}, "rad_trace must be a text of 1 to 256 characters"),
        ({"rad_weights": {"kind": 1}}, 'rad_weights must be a list of "name=weight" texts'),
        ({"rad_weights": []}, "rad_weights must be a list"),
        ({"rad_weights": ["kind"]}, "rad_weights holds 'kind'; write \"name=weight\""),
        ({"rad_weights": ["=1"]}, "rad_weights holds '=1'"),
        ({"rad_weights": [1.0]}, "rad_weights holds 1.0"),
        ({"rad_weights": ["kind=much"]}, "rad_weights: the weight of 'kind' must be a number, got 'much'"),
        ({"rad_weights": ["kind=nan"]}, "rad_weights: the weight of 'kind' must be finite"),
        ({"rad_weights": ["kind=1", "kind=2"]}, "names the reward model 'kind' twice"),
        ({"rad_weights": ["kind=1"], "rad_reward_model": "kind"}, "rad_reward_model cannot be combined"),
        ({"rad_weights": ["kind=1"], "rad_score_index": 0}, "rad_score_index cannot be combined"),
        ({"rad_weights": ["kind=1"], "rad_invert": True}, "rad_invert cannot be combined"),
        ({"rad_beta": 1e39}, "must be at most 1e.30"),
        ({"rad_beta": 1e20, "rad_weights": ["kind=-1e20"]}, "times the sizes of all rad_weights, must be at most"),
    ],
)
def test_every_fault_is_named(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        RADRequest.from_extra_args(arguments)


def test_nested_form_becomes_the_flat_one():
    nested = {"beta": 2, "top_k": 7, "weights": {"kind": 10, "toxic": -0.5}, "trace": "t", "invert": None}
    flat = to_extra_args(nested)
    assert flat == {"rad_beta": 2, "rad_top_k": 7, "rad_weights": ["kind=10.0", "toxic=-0.5"], "rad_trace": "t"}
    assert RADRequest.from_extra_args(flat).weights == (("kind", 10.0), ("toxic", -0.5))
    assert to_extra_args({"beta": 1, "invert": False}) == {"rad_beta": 1, "rad_invert": False}


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([1], "rad must be an object"),
        ({}, "rad is empty"),
        ({"betta": 1}, "unknown key 'betta' in rad; known are beta"),
        ({"beta": "x"}, "rad_beta must be a number"),
        ({"weights": ["kind=1"]}, "rad weights must be an object"),
        ({"weights": {"kind": "1"}}, "rad weights 'kind' must be a number"),
        ({"weights": {"kind": math.inf}}, "rad weights 'kind' must be finite"),
        ({"weights": {}}, "rad_weights must be a list"),
    ],
)
def test_faults_of_the_nested_form(nested, message):
    with pytest.raises(ValueError, match=message):
        to_extra_args(nested)


def test_engine_configuration_names_and_limits():
    config = RADEngineConfig.from_additional_config({"rad": TWO | {"max_top_k": 30}})
    assert config.model_name(None) == "kind"
    config.check_request(RADRequest(1.0, weights=(("toxic", -1.0),)))
    with pytest.raises(ValueError, match="unknown reward model 'kid'; the engine's reward models are kind, toxic"):
        config.check_request(RADRequest(1.0, reward_model="kid"))
    with pytest.raises(ValueError, match="rad_top_k is 31, but this engine allows at most 30"):
        config.check_request(RADRequest(1.0, top_k=31))
    nameless = RADEngineConfig.from_additional_config({"rad": TWO | {"default": None}})
    with pytest.raises(ValueError, match="rad_reward_model is missing and the engine has no default"):
        nameless.check_request(RADRequest(1.0))
    single = RADEngineConfig.from_additional_config({"rad": {"reward_models": {"only": {"path": "a"}}}})
    assert single.model_name(None) == "only"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "RAD needs its reward models"),
        ({}, "rad.reward_models: Field required"),
        ({"reward_models": {}}, "rad.reward_models: "),
        (TWO | {"default": "x"}, "rad: default 'x' is none of the reward models kind, toxic"),
        (TWO | {"cache_tokens": 0}, "rad.cache_tokens: "),
        (TWO | {"cache_token": 5}, "rad.cache_token: Extra inputs are not permitted"),
        ({"reward_models": {"a": {"path": "x", "score_transform": "tanh"}}}, "rad.reward_models.a.score_transform: "),
    ],
)
def test_faults_of_the_engine_configuration(entry, message):
    with pytest.raises(ValueError, match=message):
        RADEngineConfig.from_additional_config({} if entry is None else {"rad": entry})
