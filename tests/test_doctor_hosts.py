"""phalanx doctor --hosts: what hosts find out about each other."""

import json
import socket
import sys
from pathlib import Path

import pytest
from hosts import needs_hosts

import phalanx
from phalanx import cli
from phalanx.commands import CommandError
from phalanx.doctor import hosts as module
from phalanx.doctor import probes
from phalanx.doctor.verdicts import judge
from phalanx.testing.hosts import Hosts

ENV = {"PYTHONPATH": str(Path(phalanx.__file__).parents[1])}
NAMES = ["a", "b", "c"]
ADDRESSES = {name: [f"10.0.0.{number}"] for number, name in enumerate(NAMES)}
VERSIONS = {"phalanx": "1.0", "torch": "2.13.0", "python": "3.11.7"}


def consult(hosts, *words, asked="host[0-2]", env=()):
    """Run the command on all hosts; return exit codes and findings by host."""
    command = [sys.executable, "-m", "phalanx", "doctor", "--json", "--hosts", asked, *words]
    programs = [
        host.start(command, env={**ENV, **(env[host.number] if env else {})}) for host in hosts
    ]
    for program in programs:
        program.wait(60)
    return [
        (program.returncode, json.loads(program.stdout)["findings"] if program.stdout else [])
        for program in programs
    ]


def bad(findings):
    return [(finding["check"], finding["fact"]) for finding in findings if finding["advice"]]


@needs_hosts
def test_hosts_that_are_well():
    with Hosts(3) as hosts:
        (code, findings), *others = consult(hosts)
    problems = [finding for finding in findings if finding["grade"] == "problem"]
    assert (code, problems) == (0, [])
    checks = {finding["check"] for finding in findings}
    assert checks == {
        "meeting",
        "names",
        "versions",
        "ways",
        "latency",
        "bandwidth",
        "mtu",
        "clocks",
    }
    assert any("all 6 ways between 3 hosts" in finding["fact"] for finding in findings)
    for code, findings in others:
        assert code == 0
        assert findings[0]["fact"] == "all 3 hosts have met on host0"


@needs_hosts
def test_hosts_apart():
    with Hosts(3) as hosts:
        hosts[1].block(hosts[2])
        found = consult(hosts)
    assert [code for code, _ in found] == [1, 1, 1]
    for _, findings in found:
        ways = [fact for check, fact in bad(findings) if check == "ways"]
        (fact,) = ways
        assert "host1 (10.77.0.2) cannot connect to host2 (10.77.0.3): no answer" in fact
        assert "nor the other way" in fact


@needs_hosts
def test_the_first_host_cannot_be_reached():
    with Hosts(2) as hosts:
        hosts.firewall([])
        (code, findings), (other, told) = consult(hosts, "--wait", "2", asked="host0,host1")
    assert (code, other) == (1, 1)
    assert bad(findings) == [("meeting", "host1 did not come to host0 in time")]
    ((check, fact),) = bad(told)
    assert check == "meeting"
    assert "host1 has not reached host0" in fact
    assert "does not answer" in fact


@needs_hosts
def test_the_hosts_of_a_job():
    with Hosts(2, names="loopback") as hosts:
        env = [
            {
                "SLURM_PROCID": str(rank),
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_STEP_NODELIST": "host[0-1]",
            }
            for rank in range(2)
        ]
        (code, findings), (other, _) = consult(hosts, asked="job", env=env)
    assert (code, other) == (0, 0)
    assert "host0 knows itself as 127.0.1.1" in "\n".join(fact for _, fact in bad(findings))


# Verdicts


def report(number, **parts):
    ways = {str(other): {"seconds": 1e-4, "ahead": 0.0, "rate": 1e8} for other in range(3)}
    del ways[str(number)]
    return {
        "host": NAMES[number],
        "address": f"10.0.0.{number}",
        "network": f"net{number}",
        "mtu": 1500,
        "versions": VERSIONS,
        "names": ADDRESSES,
        "ways": ways,
        **parts,
    }


def told(*reports, only=None):
    return [
        (finding.check, finding.grade, finding.fact)
        for finding in judge(NAMES, reports, only)
        if finding.grade != "good"
    ]


def test_nothing_is_wrong():
    assert told(report(0), report(1), report(2)) == []


@pytest.mark.parametrize(
    ("parts", "check", "grade", "facts"),
    [
        ({"network": "net0"}, "same host", "warning", ["a and b are the same host"]),
        ({"mtu": 9000}, "mtu", "warning", ["9000 on b", "1500 on a, c"]),
        ({"versions": {"torch": "2.13.0", "python": "3.11.7"}}, "versions", "problem", ["on b"]),
        (
            {"versions": {**VERSIONS, "torch": "2.12.0"}},
            "versions",
            "problem",
            ["2.12"],
        ),
        (
            {"versions": {**VERSIONS, "python": "3.12.1"}},
            "versions",
            "warning",
            ["3.12"],
        ),
        ({"names": {**ADDRESSES, "c": []}}, "names", "problem", ["b finds", "'c'"]),
        ({"names": {**ADDRESSES, "c": ["127.0.0.1"]}}, "names", "problem", ["itself"]),
        ({"names": {**ADDRESSES, "b": ["127.0.1.1"]}}, "names", "warning", ["b knows"]),
        (
            {"names": {**ADDRESSES, "c": ["10.9.0.9"]}},
            "names",
            "warning",
            ["10.9.0.9 on b"],
        ),
        (
            {"ways": {"0": {"error": "refused"}}},
            "ways",
            "problem",
            ["refused", "other way it works"],
        ),
        (
            {"ways": {"0": {"seconds": 1e-4, "ahead": 0, "stalled": "no answer"}}},
            "ways",
            "problem",
            ["from b to a", "large ones do not"],
        ),
        (
            {"ways": {"0": {"seconds": 0.02, "ahead": 0.0, "rate": 1e8}}},
            "latency",
            "warning",
            ["20 ms from b to a"],
        ),
        (
            {"ways": {"0": {"seconds": 1e-4, "ahead": 0.0, "rate": 1e7}}},
            "bandwidth",
            "warning",
            ["from b to a about 80 Mbit/s", "800 Mbit/s"],
        ),
        (
            {"ways": {"0": {"seconds": 1e-4, "ahead": -7.0, "rate": 1e8}}},
            "clocks",
            "warning",
            ["clock of a is -7.0 s from that of b"],
        ),
    ],
)
def test_one_thing_is_wrong(parts, check, grade, facts):
    ((found_check, found_grade, fact),) = told(report(0), report(1, **parts), report(2))
    assert (found_check, found_grade) == (check, grade)
    for part in facts:
        assert part in fact


def test_each_host_is_told_of_itself():
    reports = report(0), report(1, ways={"0": {"error": "refused"}}), report(2)
    assert told(*reports, only=2) == []
    assert len(told(*reports, only=1)) == 1


def test_a_host_that_did_not_come():
    ((check, grade, fact),) = told(report(0), {}, report(2))
    assert (check, grade) == ("meeting", "problem")
    assert fact.startswith("b did not come")


# Parts


def test_probes():
    listener = probes.Listener("127.0.0.1")
    pinged = probes.ping("127.0.0.1", listener.port)
    assert 0 < pinged.seconds < 3
    assert abs(pinged.ahead) < 3
    assert probes.stream("127.0.0.1", listener.port) > 0
    listener.close()
    with pytest.raises(OSError, match="refused") as failed:
        probes.ping("127.0.0.1", listener.port)
    assert probes.reason(failed.value) == "Connection refused"
    assert probes.reason(TimeoutError()) == "no answer within 3 s"


def test_a_host_knows_which_it_is():
    own = socket.gethostname()
    assert module._which(["other", own], None) == 1
    assert module._which(["other.invalid", f"{own}.example.org"], None) == 1
    assert module._which(["other.invalid", "localhost"], None) == 1
    assert module._which(["x", "y"], "y") == 1
    with pytest.raises(CommandError, match=r"is none of x\.invalid.*--host NAME"):
        module._which(["x.invalid"], None)
    with pytest.raises(CommandError, match="--host z is none of --hosts x,y"):
        module._which(["x", "y"], "z")


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["doctor", "--hosts", "localhost", "--port", str(port)]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_wrong_arguments(capsys):
    assert cli.main(["doctor", "--hosts", "node[1-"]) == 1
    assert "bracket" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--hosts", "a", "--port", "70000"])
    assert "from 1 to 65535; got 70000" in capsys.readouterr().err


def test_a_job_that_is_none(capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", "--hosts", "job"]) == 1
    assert "found no launcher" in capsys.readouterr().err
