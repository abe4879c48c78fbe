"""Settings of every test run: no model hub, no usage statistics, actors with the priority of their driver."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# Ray's default, 15, leaves an actor hardly any time while something else keeps the cores busy: waits would end.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name that Ray reads
