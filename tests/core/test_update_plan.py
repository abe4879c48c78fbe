"""Which trees each of several updates takes."""

import pytest

from openrlhf_ebft.core.update_plan import combine_updates, plan_updates


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((5, 1, 1), [[0, 1, 2, 3, 4]]),
        ((3, 2, 1), [[0, 1, 2], [0, 1, 2]]),
        ((4, 4, 2), [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ((5, 2, 2), [[0, 1], [2, 3, 4]]),
        ((2, 4, 4), [[0], [1], [0], [1]]),  # the short last batch of an epoch: as many updates, none of them empty
    ],
)
def test_plan(sizes, expected):
    assert plan_updates(*sizes) == expected


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_plans_are_refused(sizes):
    with pytest.raises(ValueError, match=f"got {sizes[0]}, {sizes[1]} and {sizes[2]}"):
        plan_updates(*sizes)


def test_one_failed_update_shows():
    first = {"loss": 1.0, "applied": 1.0, "learning_rate": 0.1}
    second = {"loss": 3.0, "applied": 0.0, "learning_rate": 0.2}
    assert combine_updates([first], planned=1) == first
    assert combine_updates([first], planned=2) == {**first, "updates_applied": 1.0}
    assert combine_updates([first, second], planned=2) == {
        "loss": 2.0,
        "applied": 0.0,
        "learning_rate": 0.2,
        "updates_applied": 1.0,
    }
