"""The environment that Ray reads when it is imported. Imports nothing, so that it can come first."""

import os


def set_ray_environment() -> None:
    """Set what this process and its children must have before the first `import ray`. May be called twice."""
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray writes a token at its first start; afterwards every process must present it.
            "RAY_AUTH_MODE": "token",
            "RAY_DEDUP_LOGS": "0",
            # Actors are the product here, not a guest on somebody's desktop: the default is 15.
            "RAY_worker_niceness": "0",
            # A spinning OpenMP thread takes the core from the other worker.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    )
