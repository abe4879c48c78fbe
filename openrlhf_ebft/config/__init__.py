"""Every knob with unit, default and check; nothing here imports more than pydantic and yaml."""

from openrlhf_ebft.config.errors import ConfigError, UserError
from openrlhf_ebft.config.load import dump_config, load_config
from openrlhf_ebft.config.sections import EBFTConfig

__all__ = ["ConfigError", "EBFTConfig", "UserError", "dump_config", "load_config"]
