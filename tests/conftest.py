"""Settings of every test run: no model hub, no usage statistics."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
