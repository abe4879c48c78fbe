"""Joins a Ray cluster, or starts a local one."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import ray

from openrlhf_ebft.actors.placement import PlacementError

_ANSWER_S = 5.0  # limit for a cluster's head to accept a connection, in seconds


def join_cluster(ray_address: str | None, environment: Mapping[str, str] | None = None) -> None:
    """Joins the cluster at `ray_address` (or RAY_ADDRESS), else starts a local one.

    A local cluster has no dashboard, listens on this machine only, and its processes inherit `environment`. It keeps no
    record of past calls, which the dashboard alone shows: by default Ray keeps 100,000 of them, at 3 KiB each.

    Raises:
        PlacementError: no cluster answers at the address, or it refuses this program.
    """
    address = ray_address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        _require_answer(address)
    else:
        os.environ.update(environment or {})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address or "local",  # None would join any cluster that runs on this machine
            include_dashboard=None if address else False,
            _system_config=None if address else {"task_events_report_interval_ms": 0},
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster {address} could not be joined" if address else "a local Ray could not be started"
        no_token = address is not None and "RAY_AUTH_MODE" not in os.environ
        hint = " (if the cluster asks for a token: export RAY_AUTH_MODE=token)" if no_token else ""
        raise PlacementError(f"{where}: {error}{hint}") from error


def _require_answer(address: str) -> None:
    """Raises PlacementError unless something listens at `address`: Ray itself would try for two minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # a word such as `auto`, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}): set placement.ray_address (or RAY_ADDRESS) to the "
            "HOST:PORT of its head node, or leave both out for a local one"
        ) from None
