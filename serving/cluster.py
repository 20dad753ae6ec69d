"""`Cluster`: builds, starts, watches and stops one deployment. The supervisor process runs it.

Owns the Ray cluster (unless it joined one), the run folder and every actor; actors never own one another,
since Ray ends an actor's children with it. `ray_environment` must have been applied before the import.
"""

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from configs import DeploymentConfig
from scheduler.messages import WorkerRegistration
from serving.actors.central_actor import CentralActor
from serving.actors.directory import CENTRAL_ACTORS, ActorPlace
from serving.actors.door_actor import DoorActor
from serving.actors.worker_actor import WorkerActor
from serving.run_folder import RUN_ID_VARIABLE, RunFolder, sweep
from serving.supervisor import Supervisor
from serving.workers.worker_plan import WorkerPlan, worker_names

_log = logging.getLogger("pdserve.cluster")
_DRAIN_LOOK_S = 0.2
_STOP_TIMEOUT_S = 10.0
_RECORD_EVERY_S = 1.0


class StartError(Exception):
    """The deployment could not start; the message is for the user."""


class Cluster:
    """One deployment, from `start` to `stop`."""

    def __init__(self, config: DeploymentConfig, model_folder: Path) -> None:
        """Nothing is started yet."""
        self._config = config
        self._model_folder = model_folder
        self._run: RunFolder | None = None
        self._owns_ray = False
        self._centrals: list[Any] = []  # Ray's handles have no static type
        self._doors: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}
        self._supervisor: Supervisor | None = None
        self._recorded_at_s = float("-inf")

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> int:
        """Sweep old runs, start everything, return the door's port.

        Raises:
            StartError: the port is taken, a worker failed to start, or the time is over. Everything that
                was started has been stopped.
        """
        for run_id in sweep():
            _log.warning("removed what run %s had left behind", run_id)
        _check_port(self._config.server.host, self._config.server.port)
        try:
            ray_folder = Path(tempfile.mkdtemp(prefix="pdserve-"))
            self._run = RunFolder.create([ray_folder])
            self._start_ray(ray_folder)
            return self._start_actors()
        except BaseException as error:
            self.stop()
            if isinstance(error, ray.exceptions.RayError | OSError | TimeoutError | RuntimeError):
                raise StartError(_reason(error)) from error
            raise

    def _start_ray(self, ray_folder: Path) -> None:
        assert self._run is not None
        # Inherited by every process of a private cluster. (A runtime environment of an actor would cost it
        # the Python process that Ray has already started.)
        os.environ[RUN_ID_VARIABLE] = self._run.run_id
        os.environ["OMP_NUM_THREADS"] = str(_threads_per_worker(self._config))
        cluster = self._config.cluster
        self._owns_ray = not cluster.ray_address
        if cluster.ray_address:
            ray.init(address=cluster.ray_address, namespace=self._namespace, log_to_driver=True)
        else:
            ray.init(
                namespace=self._namespace,
                include_dashboard=False,
                object_store_memory=cluster.object_store_bytes,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _temp_dir=str(ray_folder),
            )
        self._run.record_processes()

    @property
    def _namespace(self) -> str:
        assert self._run is not None
        return f"pdserve-{self._run.run_id}"

    def _start_actors(self) -> int:
        assert self._run is not None
        place = ActorPlace(namespace=self._namespace, run_folder=self._run.path)
        doors = [f"door-{number}" for number in range(self._config.server.doors)]
        actors = CENTRAL_ACTORS if self._config.central.standby else CENTRAL_ACTORS[:1]
        self._centrals = [_actor(CentralActor, name).remote(place, name, self._config, doors) for name in actors]
        for name in doors:
            others = [other for other in doors if other != name]
            door = _actor(DoorActor, name).remote(place, self._config, self._model_folder, name, others)
            self._doors[name] = door
        threads = _threads_per_worker(self._config)
        plan = WorkerPlan(self._config, self._model_folder, self._run.path, threads)
        for name, role in worker_names(self._config.cluster):
            num_gpus = self._config.cluster.gpus_per_worker
            self._workers[name] = _actor(WorkerActor, name, num_gpus=num_gpus).remote(place, plan, name, role)
        deadline_s = self._config.cluster.start_timeout_s
        ray.get(self._centrals[0].look.remote(), timeout=deadline_s)
        registrations: list[WorkerRegistration] = ray.get(
            [worker.registration.remote() for worker in self._workers.values()], timeout=deadline_s
        )
        longest = min(registration.max_request_tokens for registration in registrations)
        port = self._open_doors(longest, deadline_s)
        self._supervisor = Supervisor(
            self._centrals, self._doors, self._workers, self._config.central, owns_processes=self._owns_ray
        )
        for name in doors:
            self._supervisor.open_door(name, longest, port)
        self._run.record_processes()
        return port

    def _open_doors(self, max_request_tokens: int, timeout_s: float) -> int:
        """The first one takes the port, the others share it."""
        first, *others = self._doors.values()
        port: int = ray.get(first.start.remote(max_request_tokens, self._config.server.port), timeout=timeout_s)
        ray.get([door.start.remote(max_request_tokens, port) for door in others], timeout=timeout_s)
        return port

    # -- watch -------------------------------------------------------------------------------------

    def watch(self) -> str | None:
        """Look once after everything; returns why the deployment cannot go on, or None.

        Called several times a second by the supervisor process. What dies is replaced meanwhile.
        """
        assert self._run is not None
        assert self._supervisor is not None
        now_s = time.monotonic()
        if now_s - self._recorded_at_s > _RECORD_EVERY_S:
            self._recorded_at_s = now_s
            self._run.record_processes()
        return self._supervisor.watch()

    # -- stop --------------------------------------------------------------------------------------

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let open requests end while new ones are refused; workers are looked after meanwhile.

        Returns when they have ended, after `server.drain_timeout_s`, or once `is_hurried`.
        """
        draining = [door.drain.remote() for door in self._doors.values()]
        while draining and not is_hurried():
            _, draining = ray.wait(draining, num_returns=len(draining), timeout=_DRAIN_LOOK_S)
            if self.watch() is not None:
                return

    def stop(self) -> None:
        """End everything that was started, and remove its files; may be called twice."""
        try:
            if ray.is_initialized():
                self._stop_actors()
                ray.shutdown()
        finally:
            self._supervisor = None
            self._centrals, self._doors, self._workers = [], {}, {}
            if self._run is not None:
                self._run.remove()
                self._run = None

    def _stop_actors(self) -> None:
        actors = [*self._doors.values(), *self._workers.values()]
        if actors:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=_STOP_TIMEOUT_S)
        for actor in (*actors, *self._centrals):
            ray.kill(actor, no_restart=True)


def _actor(cls: type, name: str, **options: object) -> Any:
    return ray.remote(cls).options(name=name, num_cpus=0, max_restarts=-1, **options)


def _threads_per_worker(config: DeploymentConfig) -> int:
    if config.engine.num_threads:
        return config.engine.num_threads
    return max(1, (os.cpu_count() or 1) // config.cluster.num_workers)


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            msg = f"cannot listen on {host}:{port}: {error.strerror}"
            raise StartError(msg) from error


def _reason(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[-1]
