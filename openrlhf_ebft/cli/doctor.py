"""`openrlhf-ebft doctor [CONFIG]`: what this machine or a cluster has, and what of a configuration would not fit."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, UserError, load_config

_FLAGS = {"--address": True, "--cluster": True, "--gpu-memory": True, "--help": False}


def main(argv: Sequence[str]) -> int:
    """Prints findings; returns 0 when nothing is wrong and 1 when there are problems."""
    parser = config_parser(
        "openrlhf-ebft doctor",
        "Show packages, devices, memory, disk and ports, and check where the actors of CONFIG would run.",
        EBFTConfig,
        config_required=False,
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="ask this Ray cluster for its free resources")
    parser.add_argument("--cluster", metavar="SHAPE", help="imagine a cluster: NODESxGPUS or NODESxGPUSxCPUS, as 2x8")
    parser.add_argument("--gpu-memory", metavar="GIB", type=float, help="memory of a GPU (default: this machine's)")
    own, overrides = split_overrides(argv, _FLAGS)
    arguments = parser.parse_args(own)
    if arguments.cluster and arguments.address:
        raise UserError("--cluster imagines a cluster and --address asks a real one: give one of them")
    if overrides and arguments.config is None:
        raise UserError(f"{overrides[0]} changes a configuration: name its file first")
    config = load_config(arguments.config, overrides) if arguments.config else None
    return _examine(config, arguments.address, arguments.cluster, arguments.gpu_memory)


def _examine(config: EBFTConfig | None, address: str | None, shape: str | None, gpu_gib: float | None) -> int:
    from openrlhf_ebft.actors.doctor import Findings, examine_config, examine_machine, local_nodes
    from openrlhf_ebft.actors.layout_report import parse_cluster
    from openrlhf_ebft.actors.machine import GIB

    found = Findings()
    machine = examine_machine(found)
    nodes = local_nodes(machine)
    if shape is not None:
        nodes = parse_cluster(shape)
    elif address is not None:
        from openrlhf_ebft.actors.cluster import ask_free_nodes

        nodes = ask_free_nodes(address)
        for number, node in enumerate(nodes):
            found.add("cluster", f"node {number}: {node} free")
    is_here = shape is None and address is None
    gpu_bytes = gpu_gib * GIB if gpu_gib else None
    if gpu_bytes is None and is_here and machine.gpus:
        gpu_bytes = min(gpu.memory for gpu in machine.gpus)
    if config is not None:
        examine_config(config, nodes, machine if is_here else None, gpu_bytes, found)
    print("\n".join(found.lines))
    if not found.problems:
        print("\nno problems found")
        return 0
    print(f"\n{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}:")
    for problem in found.problems:
        print(f"- {problem}")
    return 1


if __name__ == "__main__":
    sys.exit(run_command(main))
