"""Old spellings of settings and values work for one more version, with a warning, wherever settings
come from."""

import pytest

from jaxserve.cli import main as cli
from jaxserve.settings import renamed
from jaxserve.settings.flags import parse
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, SchedulerConfig, ServerConfig

SERVE = cli.load("serve")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(renamed, "FLAGS", {"greeting": "host", "reflect": "reflection"})

    def written(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return written


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_value_in_its_old_spelling_works_everywhere_and_is_warned_of(write, monkeypatch, caplog):
    warning = "policy=lrs is now llf; the old value goes with the next version"
    assert parse(SERVE, ["--policy=lrs"])["policy"] == "llf" and said(caplog) == [warning]
    assert parse(SERVE, [f"--config={write('policy: lrs')}"])["policy"] == "llf"
    assert make(EngineConfig, {"policy": "lrs"}).scheduler.policy == "llf"
    assert SchedulerConfig(policy="lrs").policy == "llf"
    monkeypatch.setenv("JAXSERVE_POLICY", "lrs")
    assert parse(SERVE, [])["policy"] == "llf"
    assert said(caplog) == [warning] * 5


def test_a_setting_by_its_old_name_works_everywhere_and_is_warned_of(write, monkeypatch, caplog):
    warning = "greeting is now host; the old name goes with the next version"
    values = parse(SERVE, ["--greeting=::1"])
    assert values["host"] == "::1" and values.origins == {"host": "--host"}
    assert said(caplog) == [warning]
    assert parse(SERVE, [f"--config={write('greeting: ::1')}"])["host"] == "::1"
    assert make(ServerConfig, {"greeting": "::1"}).host == "::1"
    monkeypatch.setenv("JAXSERVE_GREETING", "::1")
    assert parse(SERVE, [])["host"] == "::1"
    assert said(caplog) == [warning] * 4
    assert parse(SERVE, ["--noreflect"])["reflection"] is False
    assert parse(SERVE, ["--reflect"])["reflection"] is True


def test_no_name_of_today_is_also_an_old_one():
    today = SERVE.options.keys() | cli.load("bench serve").options.keys()
    for old, new in renamed.FLAGS.items():
        assert old not in today and new in today
    for name, values in renamed.VALUES.items():
        choices = SERVE.options[name].choices
        assert not set(values) & set(choices) and set(values.values()) <= set(choices)
