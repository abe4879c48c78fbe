"""The server as an application that Ray Serve itself deploys: `import_path` of a Serve configuration or RayService."""

from __future__ import annotations

from collections.abc import Mapping

from ray import serve
from ray.serve import Application

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.serving import load_serving_config
from openrlhf_ebft.serving.api_keys import read_key_digests
from openrlhf_ebft.serving.replica import RADServer
from openrlhf_ebft.serving.server import deployment_options


def build(arguments: Mapping[str, str]) -> Application:
    """Builds the application from `arguments`, whose `config` names the server's YAML file on every node.

    Serve decides where it listens (its `http_options`), which may be everywhere: API keys must be configured.

    Raises:
        UserError: no `config`, a configuration that cannot run, or neither API keys nor http.allow_anonymous.
    """
    if set(arguments) != {"config"}:
        raise UserError(f"args of the Serve application: must be config alone, not {sorted(arguments)}")
    config = load_serving_config(arguments["config"], ())
    digests = read_key_digests(config.http)
    if not digests and not config.http.allow_anonymous:
        raise UserError(
            f"{arguments['config']}: Ray Serve may listen on every address: set http.api_keys_env or "
            "http.api_keys_file, or http.allow_anonymous to true"
        )
    return serve.deployment(RADServer).options(**deployment_options(config)).bind(config, digests)
