"""Every command line of the deploy kit is one that jaxserve takes, and every settings file one that
it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.cli.engine_flags import engine_config, server_config
from jaxserve.cli.main import load
from jaxserve.server.cluster_port import check_replica_port
from jaxserve.server.supervisor import check_host
from jaxserve.settings.flags import parse
from tests.deploy import helm
from tests.deploy.command_lines import CommandLine, of_image, of_pods, of_script, of_unit
from tests.deploy.variants import VARIANTS

CONFIG = "--config="


def check(line: CommandLine, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Reads a command line as jaxserve does before it starts anything. Errors: UsageError,
    ConfigError."""
    for name, text in line.environment.items():
        if name != "PATH":
            monkeypatch.setenv(name, text)
    (folder / "settings").mkdir(exist_ok=True)
    arguments = []
    for argument in line.arguments:
        if argument.startswith(CONFIG):
            copy = folder / "settings" / Path(argument).name
            copy.write_text(line.files[argument.removeprefix(CONFIG)])
            argument = f"{CONFIG}{copy}"
        arguments.append(argument)
    name, *rest = arguments
    if name == "launch":
        name, *rest = parse(load(name), rest)["command"]
    values = parse(load(name), rest)
    server = server_config(values)
    check_host(server)
    check_replica_port(server)
    if name == "serve":
        engine_config(values)
    else:
        assert name == "conductor" and values["replicas_file"] in line.files
    paths = [server.api_keys, server.tls_cert, server.tls_key]
    assert all(path.startswith("/etc/jaxserve/") for path in paths if path is not None)
    if line.grace:
        assert server.drain_timeout < line.grace


@pytest.mark.skipif(helm.helm() is None, reason=f"no helm: `{helm.COMMAND}`")
@pytest.mark.parametrize("name", VARIANTS)
def test_of_the_chart(name, monkeypatch, tmp_path):
    lines = of_pods(helm.render(VARIANTS[name]), of_image())
    assert lines
    for line in lines:
        check(line, monkeypatch, tmp_path)


def test_of_the_image(monkeypatch, tmp_path):
    line = of_image()
    check(line, monkeypatch, tmp_path)
    assert line.environment["JAXSERVE_CACHE"].startswith("/cache/")


def test_of_the_unit(monkeypatch, tmp_path):
    check(of_unit(), monkeypatch, tmp_path)


def test_of_the_slurm_script(monkeypatch, tmp_path):
    line = of_script("slurm/jaxserve.sbatch", "srun", tmp_path)
    assert line.arguments[0] == "launch"
    check(line, monkeypatch, tmp_path)


def test_of_the_mpirun_script(monkeypatch, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    line = of_script("mpi/jaxserve-mpirun", "mpirun", tmp_path, str(hosts))
    assert line.arguments[0] == "launch"
    check(line, monkeypatch, tmp_path)
