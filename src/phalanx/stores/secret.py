"""The secret of a job: who knows it belongs to the job.

It is in the environment variable PHALANX_SECRET. Launchers of Phalanx make one for each job; who
starts ranks by other means can set it. It never travels, nor is it written anywhere: ranks prove
that they know it, or make other secrets of it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket

from phalanx import logs
from phalanx.stores.addresses import is_address, is_loopback, way_to

_log = logs.area("store")

VARIABLE = "PHALANX_SECRET"

_warned = False


def own() -> str:
    """Return the job's secret as this process knows it; "" if it knows none."""
    return os.environ.get(VARIABLE, "")


def token() -> str:
    """Return a secret for one occasion."""
    return secrets.token_hex(32)


def mixed(token: str) -> str:
    """Return what only those know who know this token and the job's secret, if it has one."""
    return hmac.new(own().encode(), token.encode(), "sha256").hexdigest() if own() else token


def is_about_secrets(error: Exception) -> bool:
    """Say whether a store was reached and refused because it, or this process, has another one."""
    return VARIABLE in str(error)


def warn_without(address: str, why: str) -> None:
    """Say, once in a process, that there is none, if other hosts can reach what listens there."""
    global _warned
    if _warned or own() or (address and is_loopback(address)):
        return
    _warned = True
    _log.warning(
        "%s, so whoever can connect to this host can take part in the job; set %s to one random "
        "value on all ranks, or see that nobody else reaches their network (docs/trust.md)",
        why,
        VARIABLE,
    )


def listening_address(host: str, listener: int | None) -> str:
    """Return the address of this host at which a name, or a socket that listens, is reached."""
    if listener is not None:
        with socket.socket(fileno=os.dup(listener)) as copy:
            return str(copy.getsockname()[0])
    return host if is_address(host) else way_to(host, 9)
