"""One replica of the server: an engine, its HTTP application, its part in draining and following a run.

The command's own process imports this module only to name the class: everything heavy is imported by the replica.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import ASGIApp

from openrlhf_ebft.config.serving import ServingConfig
from openrlhf_ebft.serving.app import Admission, build_app
from openrlhf_ebft.serving.errors import RequestError

_ANSWER_S = 5.0  # limit for other replicas to answer, in seconds
log = logging.getLogger(__name__)


@serve.ingress()
class RADServer:
    """Answers an OpenAI-compatible API with reward-augmented decoding inside the engine.

    Args:
        config: the server's configuration.
        key_digests: of the API keys.
    """

    async def __init__(self, config: ServingConfig, key_digests: Sequence[bytes]) -> None:
        from openrlhf_ebft.serving.engine import start_engine
        from openrlhf_ebft.serving.following import Follower
        from openrlhf_ebft.serving.generation import Generation
        from openrlhf_ebft.serving.run_models import base_model
        from openrlhf_ebft.serving.traces import TraceReader

        self._config = config
        self._key_digests = key_digests
        self._admission = Admission()
        base = config.model.path or base_model(Path(config.follow.run or ""))
        self._client, self._handlers = await start_engine(config, base)
        self._follower = Follower(config.follow, self._client, base)
        if config.follow.run is not None:
            await self._follower.start()
        traces = TraceReader(self._client, self._client.renderer.tokenizer)
        self._generation = Generation(config, self._handlers, traces)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = build_app(
            self._config,
            self._key_digests,
            answer=lambda body, is_chat: self._generation.answer(body, is_chat=is_chat),
            models=self._models,
            health=self._require_health,
            metrics=self._metrics,
        )
        return self._admission.wrap(app)

    async def _models(self) -> dict[str, Any]:
        listed = await self._handlers.openai_serving_models.show_available_models()
        rad = {
            "reward_models": list(self._config.reward_models),
            "default": self._config.default_reward_model,
            "max_top_k": self._config.limits.top_k,
        }
        return listed.model_dump() | {"rad": rad, "weights": self._follower.version}

    async def _require_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._admission.draining:
            raise RequestError("the server is stopping", status=HTTPStatus.SERVICE_UNAVAILABLE)
        if self._follower.fault is not None:
            raise RequestError("a change of weights failed", status=HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            await self._client.check_health()
        except EngineDeadError:
            raise RequestError("the engine has died", status=HTTPStatus.SERVICE_UNAVAILABLE) from None

    async def _metrics(self) -> str:
        """Of all replicas that answer."""
        from openrlhf_ebft.serving.metrics import joined_metrics

        texts = dict([await self.metrics()])
        if self._config.replicas.max > 1:
            texts |= {name: text for name, text in await self._ask_all("metrics") if name not in texts}
        return joined_metrics(texts)

    async def _ask_all(self, method: str) -> list[Any]:
        """What a method gives in every replica that runs and answers in time."""
        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        try:
            answers = await handle.broadcast(method).results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError) as error:
            log.warning("other replicas could not be asked: %s", error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def metrics(self) -> tuple[str, str]:
        """This replica's name and its metrics in Prometheus' text format."""
        from openrlhf_ebft.serving.metrics import replica_metrics

        name = serve.get_replica_context().replica_id.unique_id
        return name, await replica_metrics(self._client, self._admission, self._follower)

    async def check_health(self) -> None:
        """Ray Serve's own question; a replica whose engine has died is replaced."""
        await self._client.check_health()
        if self._follower.fault is not None:
            raise self._follower.fault

    async def drain(self) -> None:
        """Refuses new requests from now on."""
        self._admission.draining = True

    async def running(self) -> int:
        """Requests that are being answered."""
        return self._admission.running
