"""Changes that were thought of by hand, and which tests look after which files.

Of a file's tests the quickest come first: the first failure ends a trial.
"""

from __future__ import annotations

import json
from pathlib import Path

from mutations.trial import Change


def _tests(*names: str) -> tuple[str, ...]:
    """Return test files, or single tests of them ("work::test_this"), or native programs."""
    files = ((name, *name.partition("::")) for name in names)
    return tuple(
        name if name.startswith("native:") else f"tests/test_{file}.py{colons}{test}"
        for name, file, colons, test in files
    )


STATE = "state_after_exceptions"
TIMEOUTS = ("timeouts_of_all", "timeouts")

# Patterns of files in src/phalanx; the first that fits counts.
TESTS: dict[str, tuple[str, ...]] = {
    "world.py": _tests("world", STATE, "threads", "peer_failed", "rendezvous"),
    "groups.py": _tests("world", "collectives", STATE, "torch_world"),
    "group_calls.py": _tests("collectives", STATE, "timeouts_of_all"),
    "options.py": _tests("collectives", "types"),
    "collectives.py": _tests("collectives", STATE, "wrapper", "in_flight", "timeouts_of_all"),
    "p2p.py": _tests("p2p", STATE, "timeouts_of_all"),
    "objects.py": _tests("objects", STATE, "timeouts_of_all"),
    "coalescing.py": _tests("collectives", STATE, "timeouts_of_all"),
    "functional.py": _tests("functional", "timeouts_of_all"),
    "subgroups.py": _tests("world", "mesh", STATE, "timeouts"),
    "mesh.py": _tests("mesh", STATE),
    "sparse.py": _tests("collectives", "ddp_gradients"),
    "checks.py": _tests("collectives", "p2p", "objects", STATE, "types"),
    "work.py": _tests("work", "backend_kit", STATE, "comm_hooks"),
    "types.py": _tests("types", "reduction", "collectives"),
    "backends/base.py": _tests("backend_kit"),
    "backends/limits.py": _tests("timeouts_of_all", "torch_backend"),
    "backends/overlaps.py": _tests("backend_kit", "collectives"),
    "backends/shapes.py": _tests("wrapper", "collectives", "hierarchy_failures"),
    "backends/local.py": _tests(STATE, "local_backend", "collectives", "failures", "timeouts"),
    "backends/monitored.py": _tests("monitored_barrier", "backend_kit"),
    "backends/reduction.py": _tests("reduction", "backend_kit"),
    "backends/registry.py": _tests("world", STATE, "engines"),
    "backends/devices.py": _tests("engines"),
    "backends/engines/mpi.py": _tests("engines"),
    "backends/engines/*.py": _tests("engines", "hierarchy", "proofs"),
    "backends/hierarchy/*.py": _tests("hierarchy", "hierarchy_failures", "hierarchy_patrol"),
    "stores/redis.py": _tests("redis_store"),
    "stores/tcp.py": _tests("tcp_store", "stores", "timeouts_of_all"),
    "stores/rendezvous.py": _tests("rendezvous", "reach"),
    "stores/*.py": _tests("stores", "store_kit", "timeouts_of_all", "rendezvous", "tcp_store"),
    "launch/pool.py": _tests("pool", STATE),
    "launch/threads.py": _tests("threads", "thread_guarantees", STATE, "ranks"),
    "launch/spawn.py": _tests("spawn"),
    "launch/on_ray.py": _tests("ray"),
    "launch/placement.py": _tests("placement"),
    "launch/notebook.py": _tests("notebooks"),
    "launch/warned.py": _tests("warned"),
    "launch/voices.py": _tests("voices", "spawn", "run"),
    "launch/tracebacks.py": _tests("tracebacks"),
    "launch/*.py": _tests("ranks", "spawn", STATE, "run", "run_endings", "voices"),
    "debug/in_flight.py": _tests("in_flight"),
    "debug/top.py": _tests("top", "cli"),
    "debug/recorder.py": _tests("recorder"),
    "debug/*.py": _tests("debug", "outside", "recorder", "wrapper", "in_flight", "cli"),
    "torch_backend/*.py": _tests("timeouts_of_all", "torch_backend", "torch_calls", "torch_world"),
    "parallel/*.py": _tests(
        "ddp", "ddp_errors", "ddp_gradients", "ddp_pairs", "mixed_precision", "sync_batchnorm",
        "training_after_errors", "gradient_health", "join_ddp",
    ),
    "algorithms/join.py": _tests("join", "join_ddp"),
    "algorithms/**/*.py": _tests("comm_hooks", "comm_hooks_in_ddp", "power_sgd", "averaging"),
    "optim/*.py": _tests("zero", "zero_overlap", "averaging"),
}  # fmt: skip

_KIT = "backend_kit::test_derived_collectives_keep_the_contract"
_LOCAL = "local_backend::test_contract_on_threads"
_GLOO = "engines::test_gloo_keeps_the_contract"
_TORCH = "timeouts_of_all::test_every_operation_of_torchs_has_the_timeout_of_its_options"


def _on(path: str, old: str, new: str, *tests: str, why: str = "") -> Change:
    return Change(path, old, new, _tests(*tests), why)


CHANGES: list[Change] = [
    # Timeouts
    _on("src/phalanx/backends/base.py",
        "timeout, async_op, self._scatter,", "None, async_op, self._scatter,",
        _KIT),
    _on("src/phalanx/backends/local.py",
        "self.engine.scatter(output, inputs, root, _limit(timeout), async_op)",
        "self.engine.scatter(output, inputs, root, -1.0, async_op)",
        _LOCAL),
    _on("src/phalanx/backends/local.py",
        "self.engine.gather(outputs, input, root, _limit(timeout), async_op)",
        "self.engine.gather(outputs, input, root, -1.0, async_op)",
        _LOCAL),
    _on("src/phalanx/backends/base.py",
        "Deadline(self.timeout if timeout is None else timeout)",
        "Deadline(self.timeout)",
        _KIT),
    _on("src/phalanx/torch_backend/group.py",
        "self._inner if timeout == _UNSET else", "self._inner if timeout else",
        _TORCH),
    _on("src/phalanx/backends/engines/mailbox.py",
        "            self._expired(self, self._limit)  # who only looks must learn of it as well\n",
        "            pass\n",
        _GLOO),
    # State after exceptions
    _on("src/phalanx/coalescing.py",
        "    try:\n        yield work\n    finally:\n        member.transport = transport\n",
        "    yield work\n    member.transport = transport\n",
        STATE),
    _on("src/phalanx/backends/local.py",
        "        finally:\n            _native.batch(0, 0)\n",
        "        finally:\n            pass\n",
        STATE, "wrapper"),
    _on("src/phalanx/subgroups.py",
        "world.default.config if backend is None else BackendConfig(backend).check()",
        "world.default.config if backend is None else BackendConfig(backend)",
        STATE),
    _on("src/phalanx/trace/recorder.py",
        "    start(directory)\n    try:\n        yield\n    finally:\n        stop()\n",
        "    start(directory)\n    yield\n    stop()\n",
        STATE),
    _on("src/phalanx/work.py",
        "            self._error = error\n        self._call",
        "            self._error = None\n        self._call",
        "work", _KIT),
    _on("src/phalanx/work.py",
        "        finally:\n            self.called_at = None\n",
        "        finally:\n            pass\n",
        STATE),
    _on("src/phalanx/backends/engines/messages.py",
        "receipt.give_up(Failure(DistTimeout, ", "raise DistTimeout((\"\", ",
        _GLOO),
    # Data that only one result is right for
    _on("src/phalanx/backends/base.py",
        "inputs = overlaps.spared(inputs, [output])", "inputs = list(inputs)", _KIT),
    _on("src/phalanx/backends/base.py",
        "(input,) = overlaps.spared([input], [output])\n        return self._issue(\n",
        "return self._issue(\n", _KIT),
    _on("src/phalanx/mesh.py",
        "self._grid.permute(*others, *axes)", "self._grid.permute(*axes, *others)", "mesh"),
    _on("src/phalanx/objects.py",
        "own = data[: int(sizes[member.rank()])]", "own = data[: int(sizes[0])]", "objects"),
    _on("src/phalanx/objects.py",
        "_unpack(packed[i, :size], weights_only)", "_unpack(packed[i], weights_only)", "objects",
        why="equivalent: pickle reads no further than its end"),
    _on("src/phalanx/p2p.py",
        "return member.ranks[cast(int, source)]", "return cast(int, source)", "p2p"),
    _on("src/phalanx/collectives.py",
        "    root = checks.peer(member, src, group_src, \"src\", \"scatter\")\n",
        "    root = checks.peer(member, src, group_src, \"src\", \"scatter\") * 0\n",
        "collectives"),
    _on("src/phalanx/subgroups.py",
        "    if sort_ranks:\n        chosen.sort()\n", "    chosen.sort()\n", "mesh", "world"),
    _on("src/phalanx/backends/local.py",
        "self.engine.all_to_all(outputs, inputs, input, _limit(timeout), async_op)",
        "self.engine.all_to_all(inputs, outputs, input, _limit(timeout), async_op)",
        _LOCAL),
    # Which failure, and whose
    _on("src/phalanx/backends/engines/mailbox.py",
        "            self.out_of_step = self.out_of_step or failure\n",
        "            self.out_of_step = failure\n",
        "engines"),
    # The core
    _on("native/board.cpp",
        "  while (uint32_t holder = header().doubt.load(std::memory_order_acquire)) {\n",
        "  while (uint32_t holder = 0 * header().doubt.load(std::memory_order_acquire)) {\n",
        "native:test_board"),
    _on("native/board.cpp",
        "if (end.empty() || (first >= 0 && when(rank) >= when(first))) continue;",
        "if (end.empty() || (first >= 0 && when(rank) <= when(first))) continue;",
        STATE),
    _on("native/board.cpp",
        "  if (!header().broken.compare_exchange_strong(whole, 1)) return;\n",
        "  header().broken.compare_exchange_strong(whole, 1);\n",
        "native:test_board"),
    _on("native/reduction.cpp",
        "if (!in_place && overlap(input, result, item)) aside",
        "if (false && !in_place && overlap(input, result, item)) aside",
        _LOCAL),
    _on("native/reduction.cpp",
        "if (i == size_t(rank_)) start = filled;", "if (i == 0) start = filled;", _LOCAL),
    _on("native/exchange.cpp",
        "hit = output && !same && overlap(input, *output, item);", "hit = false;",
        "collectives", _LOCAL),
    _on("native/group.cpp",
        "call.timeout < 0 ? timeout", "call.timeout < 1e9 ? timeout", _LOCAL),
    _on("native/group.cpp",
        "  if (!agreed()) throw", "  if (false) throw", "wrapper", STATE),
    _on("native/group.cpp",
        "    call.lent = false;  // agreed by all", "    call.lent = true;  // agreed by all",
        "failures", why="performance only: memory is kept until the group is closed"),
    _on("native/roster.cpp",
        "  if (me.presence == Presence::Failed) return;\n", "", "failures", "peer_failed"),
]  # fmt: skip

# Those in training, a line each: path, old, new, tests, why.
for line in Path(__file__).with_name("training.jsonl").read_text().splitlines():
    facts = json.loads(line)
    CHANGES.append(Change(**{**facts, "tests": tuple(facts["tests"])}))
