import pathlib
import re

import grpc
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import RequestOptions
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server import jaxserve_pb2_grpc as rpc
from jaxserve.server import replica_pb2
from jaxserve.server.grpc.proto import guided_message, guided_of, sampling_message, sampling_of
from jaxserve.text.structured_output import KINDS, Guided

ROOT = pathlib.Path(__file__).parents[2]


def described(code):
    return re.search(r"AddSerializedFile\((.*)\)", code).group(1)


def test_the_generated_code_is_up_to_date(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    path = "jaxserve/server/jaxserve.proto"
    include = pathlib.Path(protoc.__file__).parent / "_proto"
    assert protoc.main(["", f"-I{ROOT}", f"-I{include}", f"--python_out={tmp_path}", path]) == 0
    fresh, kept = (folder / path.replace(".proto", "_pb2.py") for folder in (tmp_path, ROOT))
    assert described(fresh.read_text()) == described(kept.read_text()), (
        "see the first lines of server/jaxserve.proto"
    )


def test_the_stubs_know_every_method():
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        for service in pb.DESCRIPTOR.services_by_name.values():
            stub = getattr(rpc, f"{service.name}Stub")(channel)
            assert all(hasattr(stub, method.name) for method in service.methods)


def test_the_wire_has_every_sampling_field_and_knows_which_are_set():
    fields = pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(fields) == set(SamplingParams.__dataclass_fields__)
    assert all(f.has_presence or f.is_repeated for f in fields.values())


def test_the_wire_has_every_option_of_a_request():
    names = RequestOptions().options().keys() - {"slo"}
    assert names <= set(replica_pb2.Submit.DESCRIPTOR.fields_by_name)
    users = set(pb.KvOptions.DESCRIPTOR.fields_by_name) | set(pb.Slo.DESCRIPTOR.fields_by_name)
    # the tenant is the key's, and the adapter is chosen by the model's name
    assert names - {"embed", "tenant", "adapter"} <= users
    assert set(pb.KvOptions.DESCRIPTOR.fields_by_name) <= names


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams.make(
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            seed=-3,
            n=2,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            logit_bias={3: -1.5},
            logprobs=0,
            prompt_logprobs=2,
            ignore_eos=True,
            min_tokens=1,
            max_tokens=9,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
        ),
    ],
)
def test_sampling_survives_the_wire(sampling):
    sent = pb.SamplingParams.FromString(sampling_message(sampling).SerializeToString())
    assert sampling_of(sent) == sampling


@pytest.mark.parametrize(
    "guided",
    [
        Guided("json_schema", "{}"),
        Guided("json_object"),
        Guided("regex", "a"),
        Guided("grammar", 'start: "a"'),
        Guided("choice", choices=("a", "b")),
    ],
    ids=lambda guided: guided.kind,
)
def test_guides_survive_the_wire(guided):
    assert guided_of(pb.Guided.FromString(guided_message(guided).SerializeToString())) == guided


def test_the_wire_has_every_kind_of_guide_and_none_is_none():
    assert {field.name for field in pb.Guided.DESCRIPTOR.fields} == set(KINDS)
    assert guided_of(pb.Guided()) is guided_of(pb.Guided(json_object=False)) is None
    with pytest.raises(RequestError, match="xml"):
        guided_message(Guided("xml"))
