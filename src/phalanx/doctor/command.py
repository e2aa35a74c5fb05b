"""Find out what would make a job slow or fail on this machine, and what to do about it.

Every finding is good, a warning or a problem. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.debug.text import printable
from phalanx.doctor import memory, network, processors, proof, software
from phalanx.doctor.findings import Check, Finding, Host, examine

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = [
    ("phalanx doctor", "all checks; the last ones start ranks"),
    ("phalanx doctor --brief", "only what is not good"),
    ("phalanx doctor --json", "the same, for programs"),
    ("phalanx doctor --hosts a,b,c", "whether these reach each other; run it on each of them"),
    ("srun -N 4 phalanx doctor --hosts job", "the same for the hosts of a job"),
]

CHECKS = [
    Check("python", software.python),
    Check("torch", software.torch),
    Check("packages", software.others),
    Check("native core", software.core),
    Check("backend", software.backend),
    Check("cores", processors.cores),
    Check("cpu quota", processors.quota),
    Check("load", processors.load),
    Check("governor", processors.governor),
    Check("clock", processors.clock),
    Check("numa", processors.numa),
    Check("threads", processors.threads),
    Check("memory", memory.memory),
    Check("swap", memory.swap),
    Check("memfd", memory.memfd),
    Check("/dev/shm", memory.shared_files),
    Check("huge pages", memory.huge_pages),
    Check("limits", memory.limits),
    Check("scratch", memory.scratch),
    Check("hostname", network.hostname),
    Check("localhost", network.localhost),
    Check("interfaces", network.interfaces),
    Check("ports", network.ports, deadline=20),
    Check("variables", network.leftovers),
    Check("stacks", software.stacks),
    Check("2 threads", proof.threads, deadline=proof.DEADLINE + 10),
    Check("2 processes", proof.processes, deadline=proof.DEADLINE + 10),
]

_SIGNS = {"good": ("✓", "green"), "warning": ("!", "bold yellow"), "problem": ("✗", "bold red")}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="leave out what is good")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    between = parser.add_argument_group(
        "between hosts",
        "Run the same command on all of them at the same time, by whatever starts programs there. "
        "They meet on the first host, which tells of all; the others tell of themselves.",
    )
    between.add_argument(
        "--hosts",
        metavar="NAMES",
        help="names or addresses, as in a,b or node[01-04]; job: those that a launcher has started "
        "this program on",
    )
    between.add_argument("--host", metavar="NAME", help="which of them this is (found by itself)")
    between.add_argument(
        "--port", type=_port, default=29400, metavar="N", help="where they meet (29400)"
    )
    between.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="for all to come (30)"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ArgumentTypeError(f"a port is a number from 1 to 65535; got {text}")
    return int(text)


def run(arguments: Namespace) -> int:
    from phalanx.debug import looks

    console = None if arguments.json else looks.terminal()
    names = [check.name for check in CHECKS]
    findings = examine(Host(), CHECKS)
    if arguments.hosts:
        from phalanx.doctor.hosts import consult
        from phalanx.doctor.verdicts import NAMES

        names = NAMES
        findings = consult(arguments.hosts, arguments.host, arguments.port, arguments.wait)
    if arguments.json:
        found = list(findings)
        print(json.dumps(describe(found), indent=2))
    elif console is not None:
        with looks.tidy():
            found = _show(console, findings, names, arguments.brief)
    else:
        found = []
        for finding in findings:
            found.append(finding)
            if finding.grade != "good" or not arguments.brief:
                print("\n".join(lines(finding)), flush=True)
        print(summary(found))
    return int(any(finding.grade == "problem" for finding in found))


def describe(found: Sequence[Finding]) -> dict[str, object]:
    """Return the findings as plain values."""
    counts = Counter(finding.grade for finding in found)
    return {
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in found],
    }


def summary(found: Iterable[Finding]) -> str:
    """Count the findings: "1 problem, 2 warnings, 30 good"."""
    counts = Counter(finding.grade for finding in found)
    parts = []
    for grade in ("problem", "warning"):
        if counts[grade]:
            parts.append(f"{counts[grade]} {grade}{'s' if counts[grade] > 1 else ''}")
    if not parts:
        parts.append("nothing to worry about")
    return ", ".join([*parts, f"{counts['good']} good"])


def lines(finding: Finding) -> list[str]:
    """Return a finding as plain text."""
    text = [f"{finding.grade:<8}  {finding.check:<11}  {printable(finding.fact)}"]
    if finding.advice:
        text.append(f"{'':<8}  {'':<11}  -> {printable(finding.advice)}")
    return text


def _show(
    console: Console, findings: Iterable[Finding], names: Sequence[str], brief: bool
) -> list[Finding]:
    """Show findings as they come, in colours, and what is being looked at meanwhile."""
    from rich.table import Table
    from rich.text import Text

    found = []
    last = ""
    with console.status(f"looking at: {names[0]}") as status:
        for finding in findings:
            found.append(finding)
            after = names.index(finding.check) + 1
            status.update(f"looking at: {names[min(after, len(names) - 1)]}")
            if finding.grade == "good" and brief:
                continue
            sign, style = _SIGNS[finding.grade]
            fact = Text(printable(finding.fact), "" if finding.grade == "good" else "bold")
            if finding.advice:
                fact.append("\n→ ", "green").append(printable(finding.advice), "not bold green")
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=1)
            table.add_column(width=11)
            table.add_column(overflow="fold")
            name = "" if finding.check == last else finding.check
            table.add_row(Text(sign, style), Text(name, "dim"), fact)
            console.print(table)
            last = finding.check
    worst = next((g for g in ("problem", "warning") if any(f.grade == g for f in found)), "good")
    console.print(Text(summary(found), _SIGNS[worst][1]))
    return found
