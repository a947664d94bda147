"""schemathesis: requests made of the schema at /openapi.json, for each route; no answer may be a
fault, have a shape of its own, or refuse what the schema allows.

A route without a failure is a call that passed. Each failure is a call of its own, named after the
route and what the server said, so that one which is expected hides no other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from check import URL, scratch, tell, write

SEED = os.environ.get("CHECK_SEED", "1")
EXAMPLES = 30  # requests for each route and phase
SECONDS = 300  # for an answer: a chat without max_tokens goes on to the model's limit
CASE = re.compile(r"^\d+\. Test Case ID", re.MULTILINE)
KIND = re.compile(r"- (ST\d+ .+)")
SAID = re.compile(r'"message": ?"((?:[^"\\]|\\.)*)"|Invalid component: (.+)')


def main() -> None:
    write(versions={"schemathesis": metadata.version("schemathesis")})
    report = Path(scratch(), "report.xml")
    subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{URL}/openapi.json", "--no-color", "--continue-on-failure"),
            "--phases=examples,coverage,fuzzing,stateful",
            # schemas whose conditions exclude much of what is made at random
            "--suppress-health-check=too_slow,filter_too_much",
            f"--max-examples={EXAMPLES}",
            f"--request-timeout={SECONDS}",
            "--workers=4",
            f"--seed={SEED}",
            "--report=junit",
            f"--report-junit-path={report}",
        ]
    )
    for case in xml.parse(report).iter("testcase"):
        route = case.get("name", "")
        wrong = [*case.findall("failure"), *case.findall("error")]
        findings = dict.fromkeys(finding for found in wrong for finding in failures_of(found))
        if not findings:
            tell(route, None, float(case.get("time", 0)))
        for finding in findings:
            tell(f"{route}: {finding}", finding)


def failures_of(found: xml.Element) -> Iterator[str]:
    """Yields, for each case in a part of the report, the kind of failure, and what the server said
    or which part of the request is at fault."""
    text = (found.text or found.get("message") or "failed").strip()
    for case in filter(str.strip, CASE.split(text)):
        kind = KIND.search(case)
        said = SAID.search(case)
        if kind is None:
            yield case.splitlines()[0]
        else:
            parts = [kind[1], *(part for part in (said.groups() if said else ()) if part)]
            yield ": ".join(parts)


main()
