"""From files and datasets to token ids: reading, checking, splitting, tokenising, batching."""
