"""`syringa cluster start`: Ray's head, a node and the server on this machine, each started again when it dies.

The server is a process of its own: when it dies, Ray and the replicas go on, and the next one takes them over.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import typer

from syringa import logs
from syringa.cli.cluster import cluster_folder, create_folder
from syringa.cli.options import load_config
from syringa.cli.serve_process import SERVE_MODULE, ServeOptions
from syringa.cluster.authority import hosts_of
from syringa.cluster.folder import ClusterFolder, replace_file
from syringa.cluster.join import DEFAULT_PORT, ServerAddress, parse_server_address
from syringa.cluster.own_address import own_address
from syringa.config import Config
from syringa.engine.processes import managed_process
from syringa.errors import ConfigError
from syringa.ray import internals
from syringa.ray.member import ClusterMember, MemberOptions
from syringa.ray.processes import (
    GCS,
    START_SECONDS,
    RayProcess,
    environment,
    head_arguments,
    reconnect_seconds,
    wait_started,
)
from syringa.ray.redis import check_redis

logger = logging.getLogger("syringa.cluster")

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two attempts to connect to a head that was started again
STOP_MARGIN_SECONDS = 30.0  # for the server to stop, beyond its drain_timeout
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0  # after which a server that dies is started again without a longer pause


class MemberSettings(msgspec.Struct, frozen=True):
    """The node of the server's machine."""

    name: str
    labels: dict[str, str]
    cpus: int | None = None
    gpus: int | None = None


def run(
    flags: Mapping[str, Any], file: Path | None, *, node: MemberSettings | None, redis: str, redis_password: str = ""
) -> int:
    """Run until the server ends or a signal arrives. Return the exit status. `node`: of this machine; None: none."""
    config = load_config({**flags, "cluster": True}, file)
    logs.configure(config.log_level, config.log_format)
    folder = cluster_folder(Path(config.cluster_dir) if config.cluster_dir else None)
    if not folder.path.exists():
        create_folder(folder, [parse_server_address(config.cluster_address).host] if config.cluster_address else [])
    folder.check()
    folder.check_ray()
    server = server_address(config, folder)
    _check_port(config.ray_port)
    if redis:
        check_redis(redis, redis_password)
    os.environ.update(environment(folder))  # before Ray is imported; also marks the processes of the server as ours
    typer.echo(f"Machines join with `syringa cluster join {server} --token TOKEN`; `syringa cluster token` makes one.")
    start = ClusterStart(config, folder, server, redis, redis_password)
    settings = {"cluster": True, "cluster_dir": str(folder.path), "cluster_address": str(server)}
    options = ServeOptions(flags={**flags, **settings}, file=str(file) if file else None)
    return start.run(options, node)


class ClusterStart:
    def __init__(
        self, config: Config, folder: ClusterFolder, server: ServerAddress, redis: str, redis_password: str = ""
    ) -> None:
        self._config, self._folder, self._redis = config, folder, redis
        self._redis_password = redis_password if redis else ""  # Ray puts it on command lines, used or not
        self._address = _node_address(server.host)
        self._head_address = str(ServerAddress(self._address, config.ray_port))
        self._head: RayProcess | None = None
        self._head_ready = False  # whether it has accepted a connection since it was started
        self._head_start_at = 0.0  # when it is due, and then when it was started
        self._head_looked_at = -math.inf
        self._head_backoff = MIN_BACKOFF_SECONDS
        self._member: ClusterMember | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._server_start_at = 0.0  # when it is due, and then when it was started
        self._terminated = False  # whether the server was told to stop
        self._backoff = MIN_BACKOFF_SECONDS
        self._signals = 0

    def run(self, options: ServeOptions, node: MemberSettings | None) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start_head()
            if node is not None and not self._signals:
                self._start_member(node)
            while not self._signals:
                status = self._poll_server(options)
                if status is not None:
                    return status
                self._poll_head()
                if self._member is not None and self._member.poll() == "left":
                    typer.echo("The node of this machine was drained and has left; the server goes on.")
                    self._member.stop()
                    self._member = None
                time.sleep(POLL_SECONDS)
            return self._stop_server()
        finally:
            self._stop_server()
            if self._member is not None:
                self._member.stop()
            self._end_head()

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
        if self._server is not None and self._server.poll() is None:
            self._terminated = True
            self._server.terminate()  # drains; the second time, stops

    def _launch_head(self) -> RayProcess:
        arguments = head_arguments(self._address, self._config.ray_port, redis_password=self._redis_password)
        return RayProcess("Ray's head", arguments, environment(self._folder, redis=self._redis), GCS)

    def _start_head(self) -> None:
        replace_file(self._folder.ray_address, self._head_address.encode())
        self._head = self._launch_head()
        wait_started(self._head, lambda: self._signals > 0 or self._head_accepts())
        self._head_ready = True
        logger.info("cluster: Ray's head is ready: address=%s", self._head_address)

    def _head_accepts(self) -> bool:
        try:
            internals.check_head(self._head_address, self._folder.ray_files())
        except internals.ConnectionRefused as error:
            raise ConfigError(str(error)) from None
        except internals.HeadUnavailable:
            return False
        return True

    def _start_member(self, node: MemberSettings) -> None:
        self._member = ClusterMember(
            MemberOptions(
                head=self._head_address,
                folder=self._folder,
                name=node.name,
                address=self._address,
                labels=node.labels,
                cpus=node.cpus,
                gpus=node.gpus,
            )
        )
        self._member.start(lambda: self._signals > 0)

    def _poll_head(self) -> None:
        now = time.monotonic()
        if self._head is None:
            if now >= self._head_start_at:
                self._head, self._head_ready, self._head_start_at = self._launch_head(), False, now
            return
        if self._head.running:
            self._poll_new_head(self._head, now)
            return
        logger.error("cluster: Ray's head has died: reason=%s", self._head.failure())
        self._end_head()
        if not self._head_ready:  # there are no nodes that it could lose
            self._head_start_at, self._head_backoff = now + self._head_backoff, self._next_head_backoff
        elif self._redis:
            self._head_start_at = now + 1.0
        else:
            # A new head knows nothing of the nodes that wait for the old one: their replicas would end at once.
            wait = reconnect_seconds()
            logger.error("cluster: the replicas serve on for %d s; then head and nodes are started again", wait)
            self._head_start_at = now + wait

    def _poll_new_head(self, head: RayProcess, now: float) -> None:
        """Find out whether a head that was started again accepts connections. One that does not is ended."""
        if self._head_ready or now < self._head_looked_at + LOOK_SECONDS:
            return
        try:
            self._head_ready = self._head_accepts()
        except ConfigError as error:
            logger.error("cluster: %s", error.message)
        self._head_looked_at = time.monotonic()
        if self._head_ready:
            self._head_backoff = MIN_BACKOFF_SECONDS
            logger.info("cluster: Ray's head is ready: address=%s", self._head_address)
        elif self._head_looked_at > self._head_start_at + START_SECONDS:
            logger.error("cluster: Ray's head has not started within %.0f s: log=%s", START_SECONDS, head.log)
            self._end_head()
            self._head_start_at = self._head_looked_at

    @property
    def _next_head_backoff(self) -> float:
        return min(2 * self._head_backoff, MAX_BACKOFF_SECONDS)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.stop()
            self._head = None

    def _poll_server(self, options: ServeOptions) -> int | None:
        """Start the server if it is due. Return its exit status if it has stopped, and None if it goes on or died."""
        now = time.monotonic()
        if self._server is None:
            if now >= self._server_start_at:
                self._server, self._server_start_at = _spawn_server(options), now
            return None
        status = self._server.poll()
        if status is None:
            return None
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server = None
        if status in (0, managed_process.EXIT_CANNOT_START):
            return min(status, 1)  # it has printed the reason
        if now - self._server_start_at >= STABLE_SECONDS:
            self._backoff = MIN_BACKOFF_SECONDS
        logger.error("cluster: the server died and is started again: exit=%s", managed_process.describe_exit(status))
        self._server_start_at, self._backoff = now + self._backoff, min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        return None

    def _stop_server(self) -> int:
        if self._server is None:
            return 0
        if self._server.poll() is None and not self._terminated:
            self._server.terminate()  # also after a signal that arrived while it was being started
        try:
            status = self._server.wait(self._config.drain_timeout + STOP_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            status = self._server.wait()
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server = None
        return min(max(status, 0), 1)


def server_address(config: Config, folder: ClusterFolder) -> ServerAddress:
    """Return the address at which nodes join. Raises `ConfigError` if the certificate is not for its host."""
    given = config.cluster_address or str(ServerAddress(own_address(), DEFAULT_PORT))
    address = parse_server_address(given)
    hosts = hosts_of(Path(folder.files("server").certificate).read_bytes())
    for host in (address.host, _node_address(address.host)):
        if host not in hosts:
            raise ConfigError(
                f"the certificate in {folder.path} is for {', '.join(hosts)}, and not for {host}: choose another "
                f"--cluster-address, or make a new folder with `syringa cluster init --host {host}`",
                param="cluster_address",
            )
    return address


def _node_address(host: str) -> str:
    """Return the IP address of this machine for Ray, which does not use those that only this machine can reach."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise ConfigError(f"cluster_address: {host}: {error.strerror}", param="cluster_address") from None
    return own_address() if address.is_loopback or address.is_unspecified else str(address)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = f"ray_port {port}: {error.strerror}; is there a cluster on this machine already?"
            raise ConfigError(reason, param="ray_port") from None


def _spawn_server(options: ServeOptions) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", SERVE_MODULE],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the parent, which passes it on
    )
    managed_process.send_options(process, options)
    return process
