"""The switch between hosts: what its links can do, and what it lets through."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.testing.hosts import relay
from phalanx.testing.hosts.programs import HostError, environment, inside, script

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_FULL_SEGMENTS = 65536


@dataclass(frozen=True)
class Link:
    """What links are like: bits per second, seconds from host to host, and fraction of losses."""

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0

    @staticmethod
    def read(rate: str | None, delay: float, loss: float) -> Link:
        """Check what a user asks for."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate or "1bit")
        if not found or float(found[1]) == 0:
            raise ValueError(f"rate must be as '100mbit' or '10gbit', got {rate!r}")
        if delay < 0:
            raise ValueError(f"delay must not be negative, got {delay} s")
        if not 0 <= loss < 1:
            raise ValueError(f"loss is a fraction, at least 0 and below 1, got {loss}")
        return Link(float(found[1]) * _UNITS[found[2]] if rate else None, delay, loss)

    @property
    def is_perfect(self) -> bool:
        """Whether every packet arrives at once."""
        return not self.delay and not self.loss

    @property
    def burst(self) -> int:
        """How many bytes may pass at once: what passes in 0.1 ms, or a few packets."""
        return max(16384, int((self.rate or 0) / 8 * 1e-4))

    def segments(self, device: str) -> list[str]:
        """Return lines for `ip`: how large the pieces are that a host sends.

        What a network card would cut to packets passes, and gets lost, as one piece here.
        """
        size = min(_FULL_SEGMENTS, self.burst) if self.rate else _FULL_SEGMENTS
        number = 1 if self.loss else 65535
        return [f"link set dev {device} gso_max_size {size} gso_max_segs {number}"]

    def queue(self, device: str) -> str:
        """Return a line for `tc`: how fast a device sends."""
        if self.rate is None:
            return f"qdisc replace dev {device} root noqueue"
        limit = max(1 << 17, int(self.rate / 8 * 0.01))  # bytes that wait, at most 10 ms
        return (
            f"qdisc replace dev {device} root tbf rate {self.rate:.0f}bit "
            f"burst {self.burst + 4096} limit {limit}"
        )

    def netem(self, device: str) -> str:
        """Return a line for `tc`: how fast and how well a device sends."""
        rate = f"rate {self.rate:.0f}bit" if self.rate else ""
        return (
            f"qdisc replace dev {device} root netem delay {self.delay * 1e6:.0f}us "
            f"loss {self.loss * 100:g}% {rate} limit 100000"
        )


class Switch:
    """A network namespace with a port for each host.

    The ports are in a bridge, or out of it while a program forwards packets.
    """

    def __init__(self, keeper: int, size: int) -> None:
        self.link = Link()
        self._keeper = keeper
        self._ports = {number: f"port{number}" for number in range(size)}
        self._open_ports: list[int] | None = None
        self._relay: subprocess.Popen[str] | None = None

    def batch(self, command: Literal["ip", "tc"], lines: list[str]) -> None:
        """Have `ip` or `tc` do these lines."""
        batch(self._keeper, "the switch", command, lines, ["net"])

    def plug(self, number: int, state: Literal["up", "down"]) -> None:
        """Turn a port on or off."""
        self.batch("ip", [f"link set dev {self._ports[number]} {state}"])

    def remove(self, number: int) -> None:
        """Forget a port whose host is gone."""
        del self._ports[number]

    def shape(self, link: Link) -> None:
        """Have all links be like this, towards the hosts."""
        self.link = link
        self._apply()

    def firewall(self, open_ports: Sequence[int] | None) -> None:
        """Drop requests for TCP connections except to these ports."""
        self._open_ports = None if open_ports is None else list(open_ports)
        self._apply()

    @property
    def forwarder(self) -> str:
        """Who forwards packets: "bridge", "netem" (and the bridge), or "relay", a program."""
        if self._open_ports is not None or not (self.link.is_perfect or self.has_netem()):
            return "relay"
        return "bridge" if self.link.is_perfect else "netem"

    def has_netem(self) -> bool:
        """Tell whether the kernel can delay and lose packets by itself."""
        try:
            self.batch("tc", ["qdisc replace dev lo root netem", "qdisc del dev lo root"])
        except HostError as error:
            if "qdisc kind is unknown" not in str(error):
                raise
            return False
        return True

    def _apply(self) -> None:
        forwarder = self.forwarder
        line = self.link.netem if forwarder == "netem" else self.link.queue
        self.batch("tc", [line(port) for port in self._ports.values()])
        if forwarder != "relay":
            self._stop_relay()
            return
        if self._relay is None:
            self.batch("ip", [f"link set dev {port} nomaster" for port in self._ports.values()])
            words = script(relay, self._keeper, *self._ports.values())
            self._relay = subprocess.Popen(
                inside(self._keeper, ["net"], words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
                text=True,
                start_new_session=True,
            )
        self._tell_relay()

    def _tell_relay(self) -> None:
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        orders = {"delay": self.link.delay, "loss": self.link.loss, "open_ports": self._open_ports}
        self._relay.stdin.write(json.dumps(orders) + "\n")
        self._relay.stdin.flush()
        if self._relay.stdout.readline() != "done\n":
            raise HostError("the program that forwards packets has ended")

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self.close()
            self.batch(
                "ip", [f"link set dev {port} master bridge0" for port in self._ports.values()]
            )

    def close(self) -> None:
        """End what forwards packets."""
        if self._relay is not None:
            self._relay.communicate()  # which closes its stdin
            self._relay = None


def batch(
    pid: int,
    where: str,
    command: Literal["ip", "tc"],
    lines: list[str],
    kinds: Sequence[str] = ("net", "mnt"),
) -> None:
    """Have `ip` or `tc` do lines in the namespaces of a process."""
    done = subprocess.run(
        inside(pid, kinds, [command, "-batch", "-"]),
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env=environment(),
    )
    if done.returncode != 0:
        raise HostError(f"{command} failed on {where}: {done.stderr.strip()}")
