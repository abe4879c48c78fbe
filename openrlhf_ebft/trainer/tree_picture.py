"""A rollout tree as a picture: tokens, anchors, branches and who may attend to whom."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.core.rollout_tree import RolloutTree

MAX_TOKENS = 200
"""Largest tree that is drawn: its mask has a cell for every pair of tokens."""

_CELL = 9  # pixels
_STYLE = """
body { font-family: sans-serif; margin: 2em; max-width: 70em }
.token { display: inline-block; border: 1px solid #ccc; padding: 1px 3px; margin: 1px; font-family: monospace;
  white-space: pre }
.anchor { border-left: 3px solid #c0392b }
.branch { background: #e8f1fb }
.row { margin-left: 2em }
td { vertical-align: top; padding: 2px 8px }
"""


def token_text(decode: Callable[[list[int]], str], token: int) -> str:
    """A token as visible text."""
    return decode([token]).replace("\n", "\\n").replace("\t", "\\t")


def write_picture(tree: RolloutTree, decode: Callable[[list[int]], str], out: Path) -> None:
    """Writes an .html file, or with any other ending a PNG.

    Raises:
        UserError: a tree that is too large, or PNG without matplotlib.
    """
    if len(tree) > MAX_TOKENS:
        raise UserError(
            f"a tree of {len(tree)} tokens is too large to draw: at most {MAX_TOKENS}; lower --tokens, --samples or "
            "the length of completions (rollout.max_new_tokens, in strided mode data.generate_max_len)"
        )
    if out.suffix == ".html":
        out.write_text(_html(tree, decode), encoding="utf-8")
    else:
        _write_png(tree, decode, out)


def _html(tree: RolloutTree, decode: Callable[[list[int]], str]) -> str:
    texts = [html.escape(token_text(decode, token)) for token in tree.token_ids.tolist()]
    anchors = set(tree.reference.anchors.tolist())
    count = tree.num_reference_tokens
    reference = "".join(
        f'<span class="token{" anchor" if i in anchors else ""}" title="position {p}">{texts[i]}</span>'
        for i, p in enumerate(tree.position_ids[:count].tolist())
    )
    rows = []
    for branch in range(tree.num_branches):
        anchor, sample = divmod(branch, tree.num_samples)
        own = [count + i for i in (tree.branch_of_token == branch).nonzero().flatten().tolist()]
        tokens = "".join(f'<span class="token branch">{texts[i]}</span>' for i in own)
        name = f"anchor {int(tree.reference.anchors[anchor])}, completion {sample}"
        rows.append(f"<tr><td>{name}</td><td>{tokens}</td></tr>")
    return (
        f"<!doctype html><meta charset=utf-8><title>rollout tree</title><style>{_STYLE}</style>"
        f"<h1>Rollout tree of {html.escape(tree.example_id)}</h1>"
        f"<p>Reference: {count} tokens, computed once; an anchor lies before each red line.</p><p>{reference}</p>"
        f"<h2>Branches</h2><table>{''.join(rows)}</table>"
        f"<h2>Attention</h2><p>Row: the token that looks; column: the token that is seen. Grey: reference, blue: the "
        f"branch's own tokens.</p>{_mask_svg(tree)}"
    )


def _mask_svg(tree: RolloutTree) -> str:
    size, count = len(tree), tree.num_reference_tokens
    cells = []
    for row, column in tree.allowed().nonzero().tolist():
        colour = "#8a8a8a" if column < count else "#3b82c4"
        cells.append(
            f'<rect x="{column * _CELL}" y="{row * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{colour}"/>'
        )
    edge = size * _CELL
    lines = "".join(
        f'<path d="M{a} {b} L{c} {d}" stroke="#c0392b"/>'
        for a, b, c, d in ((count * _CELL, 0, count * _CELL, edge), (0, count * _CELL, edge, count * _CELL))
    )
    return f'<svg width="{edge}" height="{edge}" style="background:#f7f7f7">{"".join(cells)}{lines}</svg>'


def _write_png(tree: RolloutTree, decode: Callable[[list[int]], str], out: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a .png needs matplotlib (pip install matplotlib); --out with .html needs nothing") from None
    size, count = len(tree), tree.num_reference_tokens
    shown = tree.allowed().int()
    shown[:, count:] *= 2
    inches = max(4.0, 0.16 * size)
    figure = Figure(figsize=(inches + 1.5, inches + 1.0), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(shown.numpy(), cmap="Blues", vmin=0, vmax=2.5, interpolation="nearest")
    texts = [token_text(decode, token) for token in tree.token_ids.tolist()]
    positions = tree.position_ids.tolist()
    labels = [f"{text}  {position}".replace("$", r"\$") for text, position in zip(texts, positions, strict=True)]
    axes.set_yticks(range(size), labels, fontsize=6, family="monospace")
    axes.set_xticks([])
    axes.set_xlabel("key: reference, then branches anchor by anchor")
    axes.set_title("who attends to whom (token, position id)", fontsize=9)
    for edge in (axes.axhline, axes.axvline):
        edge(count - 0.5, color="#c0392b", linewidth=1)
    for anchor in tree.reference.anchors.tolist():
        axes.axvline(anchor - 0.5, color="#c0392b", linewidth=0.4, linestyle=":")
    figure.tight_layout()
    figure.savefig(out)
