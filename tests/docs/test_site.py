"""The documentation site builds without a warning, and its checks do find broken links."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ebft.config.keys import iterate_fields
from openrlhf_ebft.config.sections import EBFTConfig
from tests.docs.commands import ROOT

pytest.importorskip("material")
SOURCES = ("docs", "scripts", "benchmarks", "examples", "openrlhf_ebft", "ray_configs", "dockerfile")
FILES = ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")


def build(root, target):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_page_is_there(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    built = {path.stem for path in site.glob("*.html")}
    assert pages | {"index", "numbers", "changes", "project"} <= built


def test_configuration_page_has_every_key(site):
    page = (site / "configuration.html").read_text()
    missing = [path for path, _ in iterate_fields(EBFTConfig) if f"<code>{'.'.join(path)}</code>" not in page]
    assert not missing


def test_reference_shows_docstrings(site):
    page = (site / "api.html").read_text()
    for name in ("compute_rewards", "RolloutTree", "pass_at_k", "run_program", "load_config", "import_config"):
        assert name in page
    assert "share of subsets of k samples" in page


def test_pages_need_no_other_host(site):
    for path in site.glob("*.html"):
        sources = re.findall(r'(?:src|<link[^>]+href)="(https?://[^"]+)"', path.read_text())
        assert not sources, path.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[there](nothing.md)", "leads to no file"),
        ("[there](../nothing.py)", "leads to no file"),
        ("[there](concepts.md#no-such-heading)", "no-such-heading"),
        ("::: openrlhf_ebft.core.no_such_module", "no_such_module"),
    ],
)
def test_broken_links_fail_the_build(tmp_path, text, message):
    root = tmp_path / "repository"
    root.mkdir()
    for name in SOURCES:
        (root / name).symlink_to(ROOT / name)
    (root / "docs").unlink()
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    with (root / "docs" / "faq.md").open("a") as file:
        file.write(f"\n{text}\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert Path(ROOT / "docs" / "faq.md").read_text().find(text) < 0
