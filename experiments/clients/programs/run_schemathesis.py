"""schemathesis: requests made of the schema at /openapi.json, for each route; no answer may be a
fault, have a shape of its own, or refuse what the schema allows."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from importlib import metadata
from pathlib import Path

from check import URL, scratch, tell, write

EXAMPLES = 30  # requests for each route and phase
SECONDS = 60  # for an answer: a chat without max_tokens goes on to the model's limit


def main() -> None:
    write(versions={"schemathesis": metadata.version("schemathesis")})
    report = Path(scratch(), "report.xml")
    subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{URL}/openapi.json", "--no-color", "--continue-on-failure"),
            f"--max-examples={EXAMPLES}",
            f"--request-timeout={SECONDS}",
            "--workers=4",
            "--seed=1",
            "--report=junit",
            f"--report-junit-path={report}",
        ]
    )
    for case in xml.parse(report).iter("testcase"):
        wrong = [*case.findall("failure"), *case.findall("error")]
        said = " ".join(" ".join((found.get("message") or "failed").split()) for found in wrong)
        tell(case.get("name", ""), said or None, float(case.get("time", 0)))


main()
