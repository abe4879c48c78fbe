"""Configurations of other implementations, turned into this one's, with an account of every key."""

from openrlhf_ebft.config.importing.importer import ImportedConfig, import_config

__all__ = ["ImportedConfig", "import_config"]
