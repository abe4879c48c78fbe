"""The error of this folder."""

from openrlhf_ebft.config.errors import UserError


class DataError(UserError):
    """Rows, files or a tokenizer that cannot be used; the message names the file and row, or the tokenizer."""
