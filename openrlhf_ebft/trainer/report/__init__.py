"""One self-contained HTML page about one run or several: curves, held-out results, samples, configurations."""

from openrlhf_ebft.trainer.report.page import write_report

__all__ = ["write_report"]
