"""Hooks of the documentation site (mkdocs.yml): pages that lie elsewhere in the repository, and links to its files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"numbers.md": "benchmarks/README.md", "changes.md": "CHANGELOG.md", "project.md": "README.md"}
"""Page of the site: the file that it shows."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Puts pages that the navigation does not name under Guides."""
    named = {page for section in config["nav"] for pages in section.values() for page in pages}
    others = sorted(path.name for path in Path(config["docs_dir"]).glob("*.md") if path.name not in named)
    guides = next(section["Guides"] for section in config["nav"] if "Guides" in section)
    guides.extend(others)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of `ELSEWHERE`."""
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links that leave the documentation folder into links inside the site, or into plain names of files.

    Raises:
        FileNotFoundError: a link leads to no file of the repository.
    """
    name = page.file.src_uri
    folder = (ROOT / ELSEWHERE[name]).parent if name in ELSEWHERE else ROOT / "docs"
    pages = {source: target for target, source in ELSEWHERE.items()}

    def rewrite(match: re.Match[str]) -> str:
        image, text, target, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        path = Path(os.path.normpath(folder / target))
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: the link {target} leads to no file")
        relative = path.relative_to(ROOT).as_posix()
        if relative in pages:
            return f"{image}[{text}]({pages[relative]}{anchor})"
        if relative.startswith("docs/") and path.is_file():
            return f"{image}[{text}]({relative.removeprefix('docs/')}{anchor})"
        return f"{text} (`{relative}`)" if text.strip("`") != relative else f"`{relative}`"

    return _outside_code(markdown, lambda part: _LINK.sub(rewrite, part))


def _outside_code(markdown: str, change: Any) -> str:
    """Applies `change` to everything but fenced blocks."""
    parts = re.split(r"(^```.*?^```\s*?$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
