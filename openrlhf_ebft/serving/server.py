"""The server as a Ray Serve application: start, wait until ready, drain, stop."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.core.kernel_caches import kept_kernels
from openrlhf_ebft.serving.front import SETTING

APPLICATION = "rad"
_KERNELS = 128  # that oneDNN keeps: batches have many shapes
_LOOK_S = 0.2
_ANSWER_S = 10.0  # limit for replicas to answer a question about themselves, in seconds
_PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME")


class ServerError(RuntimeError):
    """The server could not start or stop as it should."""


class RunningServer:
    """A deployed server.

    Args:
        config: its configuration.
        handle: Ray Serve's handle of the deployment.
    """

    def __init__(self, config: ServingConfig, handle: Any) -> None:
        self.config = config
        self._handle = handle

    @property
    def url(self) -> str:
        """Where it listens."""
        host = self.config.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.http.port}"

    def is_failed(self) -> bool:
        """Whether Ray Serve has given the application up."""
        application = serve.status().applications.get(APPLICATION)
        return application is None or application.status in (ApplicationStatus.DEPLOY_FAILED,)

    def drain(self, say: Callable[[str], None]) -> bool:
        """As `_drain`; a replica that does not answer counts as one that could not finish."""
        try:
            return self._drain(say)
        except TimeoutError:
            say(f"a replica did not answer within {_ANSWER_S:g} s")
            return False

    def _drain(self, say: Callable[[str], None]) -> bool:
        """Refuses new requests with 503 and waits for the running ones; False when replicas.drain_s was too short."""
        end = time.monotonic() + self.config.replicas.drain_s
        self._ask("drain")
        running = self._running()
        if running:
            say(f"finishing {running} running requests (limit: replicas.drain_s = {self.config.replicas.drain_s:g} s)")
        while running and time.monotonic() < end:
            time.sleep(_LOOK_S)
            running = self._running()
        return not running

    def stop(self) -> None:
        """Ends the application; Ray Serve too, unless it runs other applications on a shared cluster."""
        if set(serve.status().applications) - {APPLICATION}:
            serve.delete(APPLICATION)
        else:
            serve.shutdown()

    def _running(self) -> int:
        return sum(self._ask("running"))

    def _ask(self, method: str) -> list[Any]:
        """Answers of the replicas that live; those that are dead or starting answer no requests either."""
        try:
            answers = self._handle.broadcast(method).results(timeout_s=_ANSWER_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def start_server(config: ServingConfig, key_digests: Sequence[bytes]) -> RunningServer:
    """Deploys the server on the Ray cluster that this process has joined and waits until it is ready.

    Raises:
        ServerError: Ray Serve gave up, or replicas.start_s has passed; with Ray Serve's own words.
        UserError: the port is taken.
    """
    from openrlhf_ebft.serving.replica import RADServer

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = config.http
    if not any(actor["namespace"] == "serve" for actor in ray.util.list_named_actors(all_namespaces=True)):
        _require_free(http.host, http.port)
    try:
        serve.start(http_options={"host": http.host, "port": http.port, "request_timeout_s": None})
    except (ray.exceptions.RayError, TimeoutError, RuntimeError) as error:
        raise ServerError(f"Ray Serve could not start at {http.host}:{http.port}: {error}") from error
    deployment = serve.deployment(RADServer).options(**deployment_options(config))
    try:
        target = serve.RunTarget(deployment.bind(config, tuple(key_digests)), name=APPLICATION, route_prefix="/")
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        _wait_until_ready(config.replicas.start_s)
    except BaseException:
        serve.shutdown()
        raise
    return RunningServer(config, handle)


def _require_free(host: str, port: int) -> None:
    """Ray Serve would share a port with another server of its kind, which would then get half of the requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"http.host = {host}, http.port = {port}: cannot listen there: {error.strerror}") from None


def proxy_environment() -> dict[str, str]:
    """Environment that Ray Serve's controller and proxies need; set before a local cluster starts.

    Serve replaces a proxy that is not up within 5 s or silent for 10 s, and all its connections with it: too eager for
    a machine whose cores load models.
    """
    limits = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S")
    return dict([SETTING]) | dict.fromkeys(limits, "120")


def deployment_options(config: ServingConfig) -> dict[str, Any]:
    """Ray Serve's options of the deployment."""
    replicas = config.replicas
    gpus = config.engine.tensor_parallel_size if ray.cluster_resources().get("GPU", 0) else 0
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    options: dict[str, Any] = {
        "name": "RADServer",
        "max_ongoing_requests": replicas.ongoing_requests,
        "max_queued_requests": config.limits.queued_requests,
        "graceful_shutdown_timeout_s": replicas.drain_s,
        "graceful_shutdown_wait_loop_s": _LOOK_S,
        "health_check_period_s": 5.0,
        "ray_actor_options": {
            "num_cpus": replicas.cpus,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": environment | _replica_environment(config, os.cpu_count() or 1)},
        },
    }
    if replicas.max > replicas.min:
        return options | {
            "autoscaling_config": {
                "min_replicas": replicas.min,
                "max_replicas": replicas.max,
                "target_ongoing_requests": replicas.target_ongoing_requests,
            }
        }
    return options | {"num_replicas": replicas.min}


def _wait_until_ready(limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        application = serve.status().applications[APPLICATION]
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            deployments = application.deployments.values()
            raise ServerError("; ".join([application.message, *(deployment.message for deployment in deployments)]))
        if time.monotonic() > end:
            raise ServerError(f"not ready within replicas.start_s = {limit_s:g} s: {application.message}")
        time.sleep(_LOOK_S)


def _replica_environment(config: ServingConfig, cores: int) -> dict[str, str]:
    """Environment of a replica and of the engine process that it starts.

    On CPU vLLM would pin its threads to cores, which replicas would then share, and compile one small sampling
    function for 13 s.
    """
    return kept_kernels(_KERNELS) | {
        "OMP_NUM_THREADS": str(config.replicas.threads or max(cores // config.engine.tensor_parallel_size, 1)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
