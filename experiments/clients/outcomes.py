"""Outcomes of a client's calls, judged by the failures that are expected; kept as a file for
each client, and shown together."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from jaxserve.cli.display import table

EXPECTED = Path(__file__).parent / "expected.yaml"
COLUMNS = ("client", "versions", "calls", "passed", "failed", "expected to fail", "date", "server")


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    server: the version and commit of jaxserve. missing: why no call was made, '' where some were.
    failed: reason by call. expected: of calls that `expected.yaml` lists, with the reason there.
    fixed: calls that it lists and that passed.
    """

    client: str
    date: str
    server: str
    versions: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return self.passed + len(self.failed) + len(self.expected)


def expected_failures(client: str, file: Path = EXPECTED) -> dict[str, str]:
    """Reason by pattern of a call's name, for one client. The file has patterns by reason, for they
    are many and reasons are few."""
    listed: Mapping[str, Sequence[str]] = (yaml.safe_load(file.read_text()) or {}).get(client, {})
    return {pattern: reason for reason, patterns in listed.items() for pattern in patterns}


def judged(
    client: str,
    lines: Iterable[str],
    ended: str,
    known: Mapping[str, str],
    *,
    date: str,
    server: str,
) -> Outcome:
    """Reads what a client's program wrote. ended: why it ended too early, '' where it did not;
    known: reason by pattern of what is expected to fail."""
    versions: dict[str, str] = {}
    passed = 0
    failed: dict[str, str] = {}
    expected: dict[str, str] = {}
    fixed: list[str] = []
    for line in map(json.loads, lines):
        versions |= line.get("versions", {})
        if "call" not in line:
            continue
        name = line["call"]
        reason = next((why for like, why in known.items() if fnmatch.fnmatchcase(name, like)), None)
        if line["reason"] is None:
            passed += 1
            fixed += [name] if reason is not None else []
        elif reason is not None:
            expected[name] = reason
        else:
            failed[name] = line["reason"]
    if ended:
        failed["(the program)"] = ended
    return Outcome(
        client,
        date,
        server,
        versions,
        passed=passed,
        failed=failed,
        expected=expected,
        fixed=fixed,
    )


def keep(outcome: Outcome, folder: Path) -> None:
    """Writes the outcome to a file of the client's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{outcome.client}.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")


def kept(folder: Path, clients: Iterable[str]) -> list[Outcome]:
    """Reads the outcomes of those clients that have one."""
    files = [folder / f"{name}.json" for name in clients]
    return [Outcome(**json.loads(file.read_text())) for file in files if file.exists()]


def shown(outcomes: Sequence[Outcome]) -> str:
    """The table for a terminal, and under it what failed and was not expected to."""
    parts = [table(COLUMNS[:6], [_cells(outcome)[:6] for outcome in outcomes])]
    for outcome in outcomes:
        parts += [f"{outcome.client}: {name}: {why}" for name, why in outcome.failed.items()]
        parts += [f"{outcome.client}: {name}: passes now" for name in outcome.fixed]
    return "\n".join(parts)


def summary(outcomes: Sequence[Outcome], head: str) -> str:
    """summary.md: the table, then the failures of each client."""
    lines = [head, _line(COLUMNS), _line("---" for _ in COLUMNS)]
    lines += [_line(_cells(outcome)) for outcome in outcomes]
    for outcome in outcomes:
        if outcome.failed or outcome.expected:
            lines += ["", f"## {outcome.client}", "", *_failures(outcome)]
    return "\n".join(lines) + "\n"


def _failures(outcome: Outcome) -> list[str]:
    lines = [_line(("call", "failed because")), _line(("---", "---"))]
    lines += [_line((f"`{name}`", why)) for name, why in outcome.failed.items()]
    reasons = dict.fromkeys(outcome.expected.values())
    for reason in reasons:
        names = [name for name, why in outcome.expected.items() if why == reason]
        lines.append(_line((", ".join(f"`{name}`" for name in names), f"expected: {reason}")))
    return lines


def _cells(outcome: Outcome) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    if outcome.missing:
        return [outcome.client, outcome.missing, "", "", "", "", outcome.date, outcome.server]
    counts = (outcome.calls, outcome.passed, len(outcome.failed), len(outcome.expected))
    return [outcome.client, versions, *map(str, counts), outcome.date, outcome.server]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
