"""The report: what it says about runs whose numbers are known, and what it refuses."""

import html.parser
import json
import re

import pytest

from openrlhf_ebft.cli.main import main
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.trainer.report.load import load_run, load_runs
from openrlhf_ebft.trainer.report.page import render_page
from openrlhf_ebft.trainer.report.panels import GROUPS, Panel, panel_series
from openrlhf_ebft.trainer.report.svg import fit_scale, format_number, nice_ticks
from openrlhf_ebft.trainer.report.timing import phase_seconds

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
VOID = {"meta", "input", "line", "circle", "polyline", "br", "wbr"}


def write_run(folder, *, steps=4, reward=0.5, text="fine", name="run", learning_rate=1e-6, finished=True):
    """A run directory with two supervised steps, `steps` EBFT steps and two evaluations."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"name: {name}\nmodel:\n  path: m\noptimizer:\n  learning_rate: {learning_rate}\nrollout:\n  temperature: 0.6\n"
    )
    records = [{"step": 0, "phase": "evaluation", "ce": 2.0, "reward": 0.1, "time/step_s": 3.0}]
    records += [{"step": s, "phase": "sft", "ce_loss": 2.0, "applied": 1.0, "time/step_s": 1.0} for s in (1, 2)]
    for step in range(3, 3 + steps):
        records.append(
            {
                "step": step,
                "phase": "ebft",
                "reward/mean": reward + step,
                "completion/length_ratio": 1.0,
                "applied": 1.0,
                "time/step_s": 4.0,
                "time/rollout_s": 2.5,
                "time/train_s": 1.0,
            }
        )
    records.append({"step": 2 + steps, "phase": "evaluation", "ce": 1.5, "reward": 0.3, "time/step_s": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sample = {"example_id": "e1", "prompt": text, "ground_truth": text, "before": text, "after": text}
    change = {"name": "ce", "change": -0.5, "standard_error": 0.125, "before": 2.0, "after": 1.5}
    (folder / "results.json").write_text(json.dumps({"changes": [change], "samples": [sample]}))
    if finished:
        (folder / "model").mkdir()
    return folder


class Checker(html.parser.HTMLParser):
    """Collects scripts and attributes, and fails on elements that are closed in the wrong order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.links, self.handlers, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "action", "srcset")]
        self.handlers += [k for k, _ in attributes if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def chart_points(page, title):
    figure = next(part for part in page.split("<figure")[1:] if f"<h3>{title}</h3>" in part)
    data = json.loads(re.search(r'id="series">(.*?)</script>', page).group(1))
    return data["charts"][re.search(r'data-chart="(\w+)"', figure).group(1)]


def test_page_is_whole_and_needs_nothing_from_outside(tmp_path):
    page = render_page(load_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two", reward=1.0)]))
    checker = parse(page)
    assert checker.links == []
    assert checker.handlers == []
    assert "http" not in page.replace("http-equiv", "")
    assert checker.tags.count("script") == 2


def test_numbers_of_the_run_reach_the_charts(tmp_path):
    page = render_page(load_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two", reward=1.0)]))
    chart = chart_points(page, "Reward")
    assert (chart["low"], chart["high"]) == (0, 6)
    lines = {(line["label"], line["heldOut"]): line["points"] for line in chart["lines"]}
    assert lines["one", False] == [[3, 3.5], [4, 4.5], [5, 5.5], [6, 6.5]]
    assert lines["two", False] == [[3, 4.0], [4, 5.0], [5, 6.0], [6, 7.0]]
    assert lines["one", True] == [[0, 0.1], [6, 0.3]]
    assert chart_points(page, "Cross-entropy of the ground truth")["lines"][0]["points"] == [[1, 2.0], [2, 2.0]]


def test_text_of_a_run_is_never_markup(tmp_path):
    run = write_run(tmp_path / "a<b>", text=EVIL, name="x")
    (run / "config.yaml").write_text(f"name: x\nmodel:\n  path: {json.dumps(EVIL)}\nextra<i>: 1\n")
    checker = parse(render_page(load_runs([run, write_run(tmp_path / "two")])))
    assert checker.tags.count("script") == 2
    assert "img" not in checker.tags
    assert EVIL in checker.text


def test_summary_changes_and_differences(tmp_path):
    page = render_page(
        load_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two", learning_rate=1e-5, finished=False)])
    )
    text = " ".join(parse(page).text)
    assert "2 → 1.5" in text
    assert "(-0.5 ± 0.125)" in text
    assert "stopped or running" in text
    differences = page[page.index("Differences of the configurations") :].replace("<wbr>", "")
    assert "optimizer.learning_rate" in differences
    assert "rollout.temperature" not in differences


def test_single_run_shows_what_is_not_the_default(tmp_path):
    page = render_page(load_runs([write_run(tmp_path / "one", learning_rate=0.5)]))
    table = page[page.index("Configuration, where not the default") :].replace("<wbr>", "")
    assert "optimizer.learning_rate" in table
    assert "1e-06" in table
    assert "rollout.temperature" not in table  # 0.6 is the default


def test_one_evaluation_is_no_change(tmp_path):
    run = write_run(tmp_path / "one", finished=False)
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(records[:-1]))
    page = render_page(load_runs([run]))
    assert '<td>cross-entropy of the ground truth</td><td class="number">2</td>' in page
    assert "&rarr;" not in page


def test_time_of_phases_adds_up(tmp_path):
    run = load_run(write_run(tmp_path / "one"))
    seconds = phase_seconds(run)
    assert seconds == pytest.approx({"evaluation": 6.0, "rollout": 10.0, "train": 4.0, "other": 4.0})
    assert sum(seconds.values()) == pytest.approx(2 * 3 + 2 * 1 + 4 * 4)


def test_warnings_name_what_went_wrong(tmp_path):
    folder = write_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        bad = {"step": 7, "phase": "ebft", "completion/length_ratio": 0.1, "completion/duplicate_share": 0.9}
        file.write(json.dumps({**bad, "applied": 0.0, "reward/mean": None}) + "\n")
        file.write('{"step": 8, "phase": "eb')
    text = " ".join(parse(render_page(load_runs([folder]))).text)
    assert "in 1 of 5 EBFT steps" in text
    assert "steps that changed no weight, because something was not finite: 1" in text
    assert "incomplete" in text
    assert "more than half of the completions repeat" in text


def test_healthy_run_has_no_warning(tmp_path):
    assert "Read with care" not in render_page(load_runs([write_run(tmp_path / "one")]))


def test_long_series_get_a_moving_average(tmp_path):
    run = load_run(write_run(tmp_path / "one", steps=100))
    (line, _) = panel_series(Panel("r", "", "reward/mean", "reward"), [run])
    assert len(line.average) == 100
    assert line.average[0] == (3, 3.5)
    assert line.average[-1] == (102, pytest.approx(102.5 - 2))  # mean of the last five: two steps behind


def test_averages_stay_within_their_phase(tmp_path):
    run = load_run(write_run(tmp_path / "one", steps=100))
    (line,) = panel_series(Panel("t", "", "time/step_s"), [run])
    assert line.average[:3] == ((1, 1.0), (2, 1.0), (3, 4.0))


def test_repeated_step_counts_once(tmp_path):
    folder = write_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "phase": "ebft", "reward/mean": 9.0}) + "\n")
    points = panel_series(GROUPS[0][1][0], [load_run(folder)])[0].points
    assert points[0] == (3, 9.0)
    assert len(points) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 9: not valid JSON"),
        ('{"phase": "ebft"}', "whole number `step`"),
        ('{"step": 1, "phase": "ebft", "loss": "x"}', "loss = 'x' is no number"),
        ("[1]", "line 9: must be an object"),
    ],
)
def test_faulty_metrics_are_named(tmp_path, line, message):
    folder = write_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load_run(folder)


def test_folders_that_hold_no_run_are_refused(tmp_path):
    run = write_run(tmp_path / "one")
    with pytest.raises(UserError, match="is no run directory: it has no metrics.jsonl"):
        load_runs([tmp_path])
    with pytest.raises(UserError, match="given twice"):
        load_runs([run, tmp_path / "." / "one"])
    with pytest.raises(UserError, match="takes 1 to 8 runs, got 9"):
        load_runs([run] * 9)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no record yet"):
        load_run(run)


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = load_runs([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert runs[0].label != runs[1].label


def test_command_writes_where_it_says(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "one")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(write_run(tmp_path / "two")), "--out", "both.html"]) == 0
    assert (tmp_path / "both.html").is_file()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-17, "0"),
        (1.5e-6, "1.5e-6"),
        (1.05e-6, "1.05e-6"),
        (0.123456, "0.123"),
        (12345.6, "12346"),
        (2e7, "2e7"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e-6, 2e-6), (1e9, 1.1e9), (0.999, 1.001)])
def test_ticks_are_round_and_inside(low, high):
    ticks = nice_ticks(low, high, 4)
    assert 2 <= len(ticks) <= 9
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in ticks)


def test_constant_values_and_single_steps_can_be_drawn(tmp_path):
    run = load_run(write_run(tmp_path / "one", steps=1))
    for panel in (Panel("c", "", "completion/length_ratio"), Panel("z", "", "applied")):
        scale = fit_scale(panel_series(panel, [run]), (3, 3))
        assert scale.y_low < 1.0 < scale.y_high
        assert 0 <= scale.x(3) <= 440
