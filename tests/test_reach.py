"""Ranks that cannot reach each other: who says so, of whom, and what is to be done."""

import os
import re
import socket
import threading

import pytest
import torch
from hosts import needs_hosts

import phalanx as dist
from phalanx.backends.hierarchy import hosts as meeting
from phalanx.errors import DistError, DistNetworkError, StoreTimeout
from phalanx.stores import HashStore, arrival, attendance
from phalanx.stores.addresses import address_of, host_address, interfaces, own_address
from phalanx.testing.hosts import Hosts


def join(timeout, **variables):
    """Make a world and use it; return what came of it."""
    os.environ.update(variables)
    dist.init_process_group(timeout=timeout)
    values = torch.ones(2)
    dist.all_reduce(values)
    dist.destroy_process_group()
    return values.tolist()


def outcomes(hosts, *args, **kwargs):
    """Let ranks join; return how each ended, within half a minute."""
    return hosts.launch(join, *args, timeout=40, return_exceptions=True, **kwargs)


@needs_hosts
def test_a_host_may_know_its_own_name_as_a_loopback_address():
    with Hosts(2, names="loopback") as hosts:
        assert outcomes(hosts, 30, MASTER_ADDR="host0") == [[2.0, 2.0]] * 2


@needs_hosts
def test_a_name_that_leads_nowhere():
    with Hosts(2, names="none") as hosts:
        here, there = outcomes(hosts, 3, MASTER_ADDR="host0")
    assert "cannot listen on 'host0'" in str(here)
    for fact in (
        "rank 1 on host 'host1' has not reached rank 0",
        "'host0' has no address",
        "getent",
    ):
        assert fact in str(there)


@needs_hosts
def test_an_address_that_every_host_has_for_itself():
    with Hosts(2) as hosts:
        here, there = outcomes(hosts, 3, MASTER_ADDR="127.0.0.1")
    assert "rank 0 waited" in str(here)
    for fact in ("rank 1 on host 'host1'", "127.0.0.1:", "is this host itself", "MASTER_ADDR"):
        assert fact in str(there)


@needs_hosts
@pytest.mark.parametrize(
    "open_ports", [[], list(range(29500, 29600))], ids=["all", "but the store"]
)
def test_a_firewall(open_ports):
    with Hosts(2) as hosts:
        hosts.firewall(list(open_ports))
        errors = outcomes(hosts, 30 if open_ports else 3, ranks=2 if open_ports else 1)
    if not open_ports:
        for fact in (
            "rank 1 on host 'host1' has not reached rank 0",
            "does not answer",
            "firewall",
        ):
            assert fact in str(errors[1])
        return
    assert [type(error) for error in errors] == [DistNetworkError] * 4, errors
    for error in errors:
        for fact in (
            "rank 0 on host 'host0' cannot reach rank 2 on host 'host1' at 10.77.0.2: no answer",
            "rank 3 on host 'host1' cannot reach rank 1 on host 'host0' at 10.77.0.1: no answer",
            "firewall",
            "phalanx doctor --hosts",
        ):
            assert fact in str(error)


@needs_hosts
def test_interfaces_that_do_not_fit():
    with Hosts(2) as hosts:
        for error in outcomes(hosts, 30, GLOO_SOCKET_IFNAME="lo"):
            assert type(error) is DistNetworkError
            assert re.search(
                r"rank \d cannot reach rank \d on host 'host\d'.*127\.0\.0\.1", str(error)
            )
        for error in outcomes(hosts, 30, GLOO_SOCKET_IFNAME="ib0"):
            assert type(error) is DistNetworkError
            assert re.search(r"'host\d' has no interface 'ib0'.*eth0 10\.77\.0\.\d", str(error))
        assert outcomes(hosts, 30, GLOO_SOCKET_IFNAME="eth0") == [[2.0, 2.0]] * 2


# Without hosts


def test_the_own_address():
    assert own_address("127.0.0.1", 9) == own_address("localhost", 9) == "127.0.0.1"
    assert own_address("no-such-host.invalid", 9) == host_address()
    assert interfaces()["lo"] == address_of("lo") == "127.0.0.1"
    assert address_of("nowhere0") is None


def test_what_is_said_while_nobody_listens(caplog, monkeypatch):
    monkeypatch.setattr(arrival, "_PATIENCE", 0.1)
    with socket.socket() as taken:  # and silent
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        said = f"127.0.0.1:{port} is this host itself, .*nobody"
        with pytest.raises(DistNetworkError, match=said):
            arrival.arrive("127.0.0.1", port, 3, 3.0, False)
    (record,) = caplog.records
    assert "rank 3 on host" in record.getMessage()
    assert "goes on trying" in record.getMessage()


def test_rank_0_says_for_whom_it_waits(caplog, monkeypatch):
    monkeypatch.setattr(attendance, "_PATIENCE", 0.1)
    with pytest.raises(StoreTimeout, match=r"rank 0 waited 0\.3 s for 2 of 3 ranks .*: 1, 2"):
        attendance.check_in(HashStore(), 0, 3, 0.3)
    (record,) = caplog.records
    assert "rank 0 has waited 0.1 s for 2 of 3 ranks" in record.getMessage()


def test_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with server.accept()[0] as peer:
                peer.sendall(b"220 hello\r\n" * 9)

        threading.Thread(target=greet).start()
        with pytest.raises(DistNetworkError, match="not a phalanx store"):
            arrival.arrive("127.0.0.1", server.getsockname()[1], 1, 60, False)


# Versions


def test_versions_that_differ_are_named():
    hosts = [
        meeting.Host(f"id{rank}", f"host{rank}", 1, {"phalanx": "1.2", "torch": version})
        for rank, version in enumerate(["2.13.0", "2.13.0", "2.12.1", "2.13.0"])
    ]
    text = meeting.disagreement(hosts)
    assert "torch 2.12.1 on rank 2 (host2)" in text
    assert "2.13.0 on ranks 0, 1, 3" in text
    assert "phalanx" not in text
    assert meeting.disagreement(hosts[:2]) == ""


def other_version(rank):
    version = "0.9" if int(os.environ["RANK"]) == rank else "1.0"
    meeting._versions = lambda: {"phalanx": version, "torch": "2.13.0"}
    dist.init_process_group(timeout=30)


@needs_hosts
def test_ranks_of_several_versions_do_not_meet():
    with Hosts(2) as hosts:
        for error in hosts.launch(other_version, 1, return_exceptions=True):
            assert type(error) is DistError
            assert "phalanx 0.9 on rank 1 (host1), but 1.0 on rank 0" in str(error)
