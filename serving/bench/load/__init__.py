"""Load over HTTP: what is sent and when, to which deployment, and what a client sees of it.

Imports nothing of the server, so that the same client measures any OpenAI-compatible one.
"""

from serving.bench.load.client import OneServer, PrefillDecodePair, RefusedError, Target
from serving.bench.load.deployments import Deployment, DeploymentChoice, make_deployment
from serving.bench.load.drive import drive
from serving.bench.load.processes import DeploymentError, running
from serving.bench.load.results import ResultsFile
from serving.bench.load.sample import Sample
from serving.bench.load.summary import percentile, summarize
from serving.bench.load.workload import Job, Lengths, closed_jobs, long_prompt_jobs, poisson_jobs, trace_jobs

__all__ = [
    "Deployment",
    "DeploymentChoice",
    "DeploymentError",
    "Job",
    "Lengths",
    "OneServer",
    "PrefillDecodePair",
    "RefusedError",
    "ResultsFile",
    "Sample",
    "Target",
    "closed_jobs",
    "drive",
    "long_prompt_jobs",
    "make_deployment",
    "percentile",
    "poisson_jobs",
    "running",
    "summarize",
    "trace_jobs",
]
