"""The page in headless Chromium against the real server: what a person does, in light and dark."""

from __future__ import annotations

import shutil

import pytest

from tests.serving.browser import NAMES, Browser
from tests.serving.conftest import KEY

EXECUTABLE = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    browser = Browser(EXECUTABLE, tmp_path_factory.mktemp("profile"))
    try:
        yield browser
    finally:
        browser.close()


def fill(page: Browser, **values) -> None:
    for name, value in values.items():
        field = f"document.getElementById('{name.replace('_', '-')}')"
        page.evaluate(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input'))")


def run(page: Browser) -> None:
    page.evaluate("document.getElementById('run').click()")
    page.wait_for("!document.getElementById('run').disabled")


def text(page: Browser, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').textContent")


def test_a_wrong_key_is_said_in_words(server, page):
    page.open(server.url)
    page.wait_for("document.getElementById('about').textContent.includes('API key')")
    fill(page, key="wrong-key-1234")
    run(page)
    assert "wrong API key" in text(page, "fault")


def test_base_and_steered_text_with_shaded_tokens(server, page):
    page.errors.clear()
    fill(page, key=KEY, prompt="the cat", max_tokens=20, temperature=0, beta=60, top_k=10)
    run(page)
    assert text(page, "fault") == ""
    assert "tiny" in text(page, "about")
    assert text(page, "beta-shown") == "60"
    assert text(page, "base") == server.text(prompt="the cat", max_tokens=20)
    rad = {"beta": 60, "top_k": 10}
    steered = server.complete(prompt="the cat", max_tokens=20, rad=rad, rad_trace=True)
    tokens = steered["rad_trace"][0]["tokens"]
    assert text(page, "steered") == "".join(token["text"] for token in tokens)
    spans = "[...document.querySelectorAll('#steered .token')]"
    titles = page.evaluate(f"{spans}.map((span) => span.title)")
    assert titles == [f"good {token['rewards']['good']:.3f}" for token in tokens]
    colours = page.evaluate(f"{spans}.map((span) => getComputedStyle(span).backgroundColor)")
    rewards = [token["rewards"]["good"] for token in tokens]
    assert colours[rewards.index(max(rewards))] != colours[rewards.index(min(rewards))]
    assert page.errors == []


def test_the_reward_model_can_be_chosen_and_inverted(server, page):
    names = page.evaluate("[...document.getElementById('reward-model').options].map((option) => option.value)")
    assert names == ["good", "bad"]
    fill(page, reward_model="bad")
    page.evaluate("document.getElementById('invert').checked = true")
    run(page)
    rad = {"beta": 60, "top_k": 10, "reward_model": "bad", "invert": True}
    expected = server.complete(prompt="the cat", max_tokens=20, rad=rad, rad_trace=True)["rad_trace"][0]["tokens"]
    assert text(page, "steered") == "".join(token["text"] for token in expected)


def test_nothing_of_the_page_is_wider_than_the_window(server, page):
    for width in (1000, 360):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_have_readable_text(server, page, tmp_path):
    backgrounds = []
    for theme in ("light", "dark"):
        page.set_theme(theme)
        style = page.evaluate(
            "(() => { const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]; })()"
        )
        text_colour, background = (_luminance(colour) for colour in style)
        lighter, darker = max(text_colour, background), min(text_colour, background)
        assert (lighter + 0.05) / (darker + 0.05) > 7
        backgrounds.append(background)
        page.screenshot(tmp_path / f"{theme}.png")
    assert backgrounds[0] > 0.8
    assert backgrounds[1] < 0.05


def _luminance(colour: str) -> float:
    """Relative luminance of an `rgb(r, g, b)` colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
