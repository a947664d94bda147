"""Guides over gRPC: compiled beside the event loop, handed to the engine with the request, refused
by name."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.server.client import Client, ServerError
from jaxserve.server.supervisor import Background
from jaxserve.settings.schema import ServerConfig
from jaxserve.text.structured_output import Guided
from tests.engine.harness import shared
from tests.server.fakes import FakeModel, FakeReplica
from tests.text.vocabulary import EOS, tokenizer


@pytest.fixture
def fake(serve):
    fake = FakeReplica()
    fake.model = dataclasses.replace(FakeModel(), vocab=512, eos_ids=(EOS,))
    return serve(fake, tokenizer)


def test_the_engine_gets_a_guide_with_the_request(fake):
    fake.engine.paused = True
    events = fake.client.generate(
        [5], SamplingParams(max_tokens=3, n=2), guided=Guided("regex", "ab")
    )
    next(events)
    (running,) = fake.engine.requests.values()
    row = np.zeros(16, np.int32)
    running.request.guide.matcher().fill(row)
    assert np.flatnonzero(
        np.unpackbits(row.view(np.uint8), bitorder="little")
    ).tolist() == tokenizer().encode("ab", special=False)
    events.close()


@pytest.mark.parametrize(
    "guided",
    [
        Guided("json_schema", "{"),
        Guided("regex", "("),
        Guided("grammar", "start"),
        Guided("regex", "((a{1000}){1000}){1000}"),
        Guided("json_schema", json.dumps({"properties": {str(i): {} for i in range(2000)}})),
    ],
    ids=lambda guided: f"{guided.kind}-{guided.text[:9]}",
)
def test_guides_that_are_wrong_are_refused_by_name(fake, guided):
    with pytest.raises(ServerError) as fault:
        fake.client.complete([5], guided=guided)
    assert (fault.value.status, fault.value.field) == ("INVALID_ARGUMENT", f"guided.{guided.kind}")
    assert not fake.engine.requests


def test_min_tokens_and_models_without_text_exclude_guides(fake, serve):
    with pytest.raises(ServerError, match="min_tokens"):
        fake.client.complete([5], SamplingParams(min_tokens=2), guided=Guided("json_object"))
    plain = serve(FakeReplica(), None)
    with pytest.raises(ServerError, match="tokenizer") as fault:
        plain.client.complete([5], guided=Guided("json_object"))
    assert (fault.value.status, fault.value.field) == ("FAILED_PRECONDITION", "guided.json_object")


def test_answers_of_the_real_engine_obey():
    with Background(ServerConfig(grpc_port=0), lambda: (shared(), tokenizer())) as server:
        server.wait_ready()
        with Client(server.target) as client:
            sampling = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=40)
            for completion in client.complete(
                "ab", sampling, guided=Guided("regex", "[ab]{2,5}:(true|12)")
            ):
                assert (
                    re.fullmatch("[ab]{2,5}:(true|12)", completion.text)
                    and completion.reason == "stop"
                )
