"""The cost model: its formulas by hand, its fit, and the command."""

from __future__ import annotations

import json
import math

import pytest
from hosts import needs_hosts
from hypothesis import given
from hypothesis import strategies as st

from phalanx.backends.hierarchy.choices import doubling_messages, is_doubling_worth_it
from phalanx.cli import main
from phalanx.parallel import buckets
from phalanx.plan import fitting, model
from phalanx.plan.command import winners
from phalanx.plan.model import ALGORITHMS, Engine, Layout, Link, Machine, Model, best
from phalanx.testing.hosts import Hosts

MACHINE = Machine(
    flat=Engine(message=1e-4, byte=1e-9),
    between=Engine(message=2e-4, byte=2e-9),
    local=1e-5,
    local_byte=1e-10,
    add_byte=5e-10,
)
LINK = Link(rate=1e9, latency=5e-5)

layouts = st.builds(Layout, st.integers(2, 300), st.integers(1, 16))
sizes = st.integers(4, 1 << 30)


def predict(hosts: int, ranks_per_host: int) -> Model:
    return Model(MACHINE, LINK, Layout(hosts, ranks_per_host))


def test_buckets_are_those_of_ddp():
    assert buckets.DEFAULT_CAP_MB * buckets.MB == model.BUCKET
    assert buckets.DEFAULT_FIRST_BYTES == model.FIRST_BUCKET


def test_a_ring_over_all_ranks():
    # 3 steps around and 3 back, each with a quarter of the bytes.
    expected = 6 * (1e-4 + 5e-5 + 250_000 * 1e-9) + 3 * 250_000 * 5e-10
    assert predict(2, 2).flat_ring(1_000_000) == pytest.approx(expected)


def test_one_rank_per_host():
    # 4 hosts: distances 1 and 2; a host beyond them gives its part first and gets the sum last.
    step = 2e-4 + 5e-5 + 1000 / 1e9 + 1000 * 2e-9
    near = 2 * 1e-5 + 1000 * 1e-10
    assert predict(4, 2).small(1000) == pytest.approx(near + 2 * (step + 1000 * 5e-10))
    assert predict(5, 2).small(1000) == pytest.approx(near + 4 * step + 2 * 1000 * 5e-10)


def test_two_hosts_overlap_what_is_near_and_far():
    num_bytes, flows = 16 << 20, 2
    part = 2 << 20  # in four chunks
    near = 2 * 1e-5 + flows * part * 1e-10
    far = 2e-4 + 5e-5 + flows * part / 1e9 + part * (2e-9 + 5e-10)
    assert predict(2, flows).sliced(num_bytes) == pytest.approx(near + far + 3 * max(near, far))


def test_more_hosts_form_a_ring_of_each_slice():
    part = 1 << 20
    step = 2e-4 + 5e-5 + 2 * part / 1e9 + part * 2e-9
    near = 2 * 1e-5 + 16 * part * 1e-10
    expected = near + 7 * (2 * step + part * 5e-10)
    assert predict(8, 2).sliced(16 << 20) == pytest.approx(expected)


def test_doubling_pays_for_small_parts_and_many_hosts():
    assert is_doubling_worth_it(8, 512 << 10)
    assert not is_doubling_worth_it(8, 1 << 20)
    assert is_doubling_worth_it(128, 2 << 20)
    assert not is_doubling_worth_it(3, 64 << 10)
    assert [doubling_messages(hosts) for hosts in (2, 3, 4, 7, 8)] == [1, 3, 2, 4, 3]


@given(layouts, sizes)
def test_nothing_is_faster_than_the_network(layout, num_bytes):
    found = Model(MACHINE, LINK, layout)
    for call in ALGORITHMS.values():
        assert call(found, num_bytes) >= found.limit(num_bytes) * (1 - 1e-9)


@given(layouts, sizes)
def test_more_latency_and_less_bandwidth_take_longer(layout, num_bytes):
    found, worse = (Model(MACHINE, link, layout) for link in (LINK, Link(LINK.rate / 2, 1e-3)))
    for call in ALGORITHMS.values():
        assert call(found, num_bytes) < call(worse, num_bytes)


@given(layouts)
def test_winners_are_the_fastest_at_each_size(layout):
    found = Model(MACHINE, LINK, layout)
    ranges = winners(found)
    assert [size for size, _ in ranges] == sorted({size for size, _ in ranges})
    for size, name in ranges:
        assert best(found, size) == name


def test_gradients_are_reduced_while_backward_goes_on():
    found = predict(2, 2)
    # Backward is 2 of 3 seconds; all buckets but the last are hidden behind it.
    free = found.training_step(100 << 20, 3.0, lambda num_bytes: 0.0)
    assert free == pytest.approx(3.0)
    hidden = found.training_step(100 << 20, 3.0, lambda num_bytes: 0.01)
    assert hidden == pytest.approx(3.01)
    # If the network is slower than backward, its time counts alone after the first bucket.
    slow = found.training_step(101 << 20, 3.0, lambda num_bytes: 5.0)
    assert slow == pytest.approx(1.0 + 2.0 / 101 + 5 * 5.0)


def test_a_fit_finds_the_machine_that_times_are_of():
    samples = [
        fitting.Sample(library, hosts, ranks, None, size, 0.0)
        for library, hosts, ranks in (("phalanx", 2, 1), ("gloo", 2, 1))
        for size in fitting.SIZES
    ]
    link = Link(math.inf, 0.0)
    timed = []
    for sample in samples:
        found = Model(MACHINE, link, Layout(sample.hosts, sample.ranks_per_host))
        swap = MACHINE.between.message + sample.num_bytes * (MACHINE.between.byte + 5e-10)
        seconds = found.flat_ring(sample.num_bytes) if sample.library == "gloo" else swap
        timed.append(sample.__class__(*list(vars(sample).values())[:-1], seconds))
    near = [
        fitting.Sample("phalanx", 1, 2, None, size, 1e-5 + size * 1e-10) for size in fitting.SIZES
    ]
    machine = fitting.fit([*timed, *near], MACHINE.add_byte)
    for name in ("flat", "between"):
        fitted, true = getattr(machine, name), getattr(MACHINE, name)
        assert fitted.message == pytest.approx(true.message)
        assert fitted.byte == pytest.approx(true.byte)
    assert machine.local == pytest.approx(MACHINE.local)
    assert machine.local_byte == pytest.approx(MACHINE.local_byte)


def test_a_line_has_no_negative_costs():
    constant, slope = fitting.line([(4, 2e-4), (1 << 20, 1e-4)])
    assert constant > 0
    assert slope == 0


def test_ranks_that_share_cores_take_turns():
    assert MACHINE.shared(2, 2) == MACHINE
    assert MACHINE.shared(8, 2).between.message == 4 * MACHINE.between.message


def test_what_was_fitted_is_kept(tmp_path):
    path = tmp_path / "machine.json"
    fitting.write(MACHINE, [], path)
    assert fitting.read(path) == MACHINE


@needs_hosts
def test_hosts_are_measured():
    for library in ("phalanx", "gloo"):
        found = fitting.measure(library, Layout(2, 1), "1gbit", sizes=(4, 4096), budget=0.01)
        assert [sample.num_bytes for sample in found] == [4, 4096]
        assert all(0 < sample.seconds < 10 for sample in found)
        assert all(fitting.predict(MACHINE, sample) > 0 for sample in found)


def test_the_command_says_who_wins(capsys):
    assert main(["plan", "--hosts", "100", "--link", "100gbit", "--latency", "5us"]) == 0
    said = capsys.readouterr().out
    assert "100 hosts x 8 ranks = 800 ranks; links of 100 Gbit/s, 5.00 µs" in said
    assert all(name in said for name in ALGORITHMS)
    assert "what Phalanx does" in said
    assert "fastest: " in said


def test_the_command_predicts_a_training_step(capsys):
    assert main(["plan", "--bytes", "500M", "--compute", "200ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["training_step"]["phalanx"] > 0.2
    assert found["all_reduce"]["phalanx"] == found["all_reduce"]["a slice per rank"]


def test_the_command_takes_a_machine_and_draws(tmp_path, capsys):
    fitting.write(MACHINE, [], tmp_path / "machine.json")
    files = ["--machine", str(tmp_path / "machine.json"), "--plot", str(tmp_path / "plan.png")]
    assert main(["plan", "--hosts", "1250", "--json", str(tmp_path / "plan.json"), *files]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    expected = Model(MACHINE, Link(10e9 / 8, 50e-6), Layout(1250, 8)).phalanx(64 << 20)
    assert json.loads((tmp_path / "plan.json").read_text())["all_reduce"]["phalanx"] == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "1"], "from 2 to"),
        (["--link", "fast"], "25gbit"),
        (["--latency", "-1"], "50us"),
        (["--bytes", "0"], "at least 1 byte"),
    ],
)
def test_wrong_words(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "machine.json").write_text('{"machine": {"flat": 3}}')
    assert main(["plan", "--machine", str(tmp_path / "machine.json")]) == 1
    assert "--measure FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "plan.txt"], "end it with .png"),
        (["--json", "/nowhere/plan.json"], "No such file or directory"),
        (["--measure", "/nowhere/machine.json"], "No such file or directory"),
    ],
)
def test_files_that_cannot_be_written(words, said, capsys):
    assert main(["plan", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_machine_without_hosts_is_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Hosts, "unavailable", staticmethod(lambda: "there is no command ip"))
    assert main(["plan", "--measure", str(tmp_path / "machine.json")]) == 1
    assert "there is no command ip" in capsys.readouterr().err
