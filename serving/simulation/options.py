"""From the options of `pdserve simulate` to a run."""

import argparse
import logging

from configs import ClusterConfig, RouterConfig, RoutingPolicy, SchedulerConfig
from serving.simulation.arrivals import Arrival, TraceScale, random_arrivals, read_trace
from serving.simulation.cost_model import DECODE_BOUND, SMOLLM2_CPU
from serving.simulation.deployment import SimulatedDeployment
from serving.simulation.results import SimulationResults, summarize
from serving.simulation.settings import FaultSettings, NetworkSettings, SimulationSettings

_COSTS = {"smollm2-cpu": SMOLLM2_CPU, "decode-bound": DECODE_BOUND}


def simulate(arguments: argparse.Namespace) -> SimulationResults:
    """Build, run, sum up. Raises ValueError or FileNotFoundError for options and traces that cannot be used."""
    if arguments.step_failures:
        # Each injected failure would be logged with its stack; they are counted as abandoned steps instead.
        logging.getLogger("pdserve.worker").setLevel(logging.CRITICAL)
    deployment = SimulatedDeployment(settings_of(arguments))
    deployment.run(arrivals_of(arguments))
    return summarize(deployment)


def settings_of(arguments: argparse.Namespace) -> SimulationSettings:
    """The deployment that the options describe."""
    return SimulationSettings(
        cluster=ClusterConfig(
            context_workers=arguments.context_workers, generation_workers=arguments.generation_workers
        ),
        scheduler=SchedulerConfig(max_batch_size=arguments.batch),
        router=RouterConfig(
            policy=RoutingPolicy(arguments.router),
            seed=arguments.seed,
            prefix_weight=arguments.prefix_weight,
            local_prefill_max_tokens=arguments.local_prefill,
        ),
        network=NetworkSettings(bytes_per_s=arguments.bandwidth * 1e9),
        faults=FaultSettings(
            transfer_failure_share=arguments.transfer_failures,
            transfer_stall_share=arguments.transfer_stalls,
            step_failure_share=arguments.step_failures,
            worker_deaths=arguments.deaths,
        ),
        cost=_COSTS[arguments.cost],
        tokens_per_block=arguments.block_tokens,
        pages_per_context_worker=arguments.context_pages,
        pages_per_generation_worker=arguments.generation_pages,
        host_pages=arguments.host_pages,
        audit_every=arguments.audit_every,
        seed=arguments.seed,
    )


def arrivals_of(arguments: argparse.Namespace) -> list[Arrival]:
    """The requests that the options describe."""
    if arguments.trace is None:
        return random_arrivals(arguments.requests, arguments.rate, arguments.seed)
    scale = TraceScale(length=arguments.scale, output=arguments.output_scale, speed=arguments.speed)
    return read_trace(arguments.trace, scale, arguments.seed, arguments.requests)
