"""`openrlhf-ebft serve-rad CONFIG`: serve reward-augmented decoding over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.config import dump_config
from openrlhf_ebft.config.serving import ServingConfig, load_serving_config

DESCRIPTION = "Serve a language model with reward-augmented decoding over an OpenAI-compatible HTTP API."
_LOOK_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code."""
    parser = config_parser("openrlhf-ebft serve-rad", DESCRIPTION, ServingConfig)
    parser.add_argument("--print-config", action="store_true", help="print the checked configuration and stop")
    parser.add_argument(
        "--follow", metavar="RUN", help="serve the newest model of a training run; the same as --follow.run RUN"
    )
    words = sys.argv[1:] if argv is None else argv
    own, overrides = split_overrides(words, {"--print-config": False, "--follow": True, "--help": False})
    arguments = parser.parse_args(own)
    if arguments.follow is not None:
        overrides += ["--follow.run", arguments.follow]
    config = load_serving_config(arguments.config, overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    return serve(config)


def serve(config: ServingConfig) -> int:
    """Starts the server and keeps it until a signal comes; the exit code."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # the second signal does not wait for running requests
        stop.set()

    from openrlhf_ebft.serving.api_keys import read_key_digests

    digests = read_key_digests(config.http)
    from openrlhf_ebft.actors.connection import join_cluster
    from openrlhf_ebft.serving.server import ServerError, proxy_environment, start_server

    if config.follow.run is not None and config.placement.ray_address is None:
        from openrlhf_ebft.serving.run_models import require_followable

        require_followable(Path(config.follow.run))
    join_cluster(config.placement.ray_address, proxy_environment())
    say("starting: loading the models")
    try:
        server = start_server(config, digests)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_to_stop)
        say(f"serving {config.model_name} at {server.url} (reward models: {', '.join(config.reward_models)})")
        try:
            while not stop.wait(_LOOK_S):
                if server.is_failed():
                    raise ServerError("Ray Serve has given the server up; its log tells more")
            say("stopping: new requests are refused")
            finished = server.drain(say)
        finally:
            server.stop()
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say("stopped" if finished else "stopped with requests still running (replicas.drain_s has passed)")
    return 0 if finished else 1


def say(line: str) -> None:
    """A line about what the server does."""
    print(line, file=sys.stderr, flush=True)
