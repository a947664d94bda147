"""Schemas as libraries write them: what asks for nothing is accepted, what cannot be enforced is
named with its place, and what no finite JSON matches is refused."""

from __future__ import annotations

import json
import logging
import random
import re

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.text.structured_output import Guided, Guides
from jaxserve.text.structured_output.tools import calls_guide, forced_call
from tests.examples import examples
from tests.text.test_structured_output import HUGE, VOCAB, allowed, follows
from tests.text.vocabulary import EOS, tokenizer

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FIELD = "response_format.json_schema.schema"
ENDING = ["}", "]", ":", '":', "0", "n", "u", "l", '"']  # what brings most JSON to an end


@pytest.fixture(scope="module")
def guides():
    guides = Guides(tokenizer(), VOCAB, (EOS,))
    yield guides
    guides.close()


def compiled(guides, schema):
    return guides.compile(Guided("json_schema", json.dumps(schema)), FIELD)


def walked(guide, seed: int, most: int = 1500) -> str | None:
    """Random text of a guide that soon prefers what ends it; None where it does not end."""
    rng = random.Random(seed)
    ending = [tokenizer().encode(text, special=False)[0] for text in ENDING]
    text = ""
    matcher = guide.matcher()
    ids: list[int] = []
    while not matcher.done and len(ids) < most:
        may = set(allowed(matcher))
        within = re.sub(r"\\.", "", text).count('"') % 2
        wanted = [token for token in (EOS, *ending[-within:]) if token in may]
        hurry = wanted and len(ids) > 8 and rng.random() < 0.9
        ids.append(wanted[0] if hurry else rng.choice(sorted(may)))
        matcher.push(ids[-1])
        text = tokenizer().decode(ids)
    return text if matcher.done else None


def record(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


NOTHING_ASKED = {
    "effectless values": {
        "type": ["array", "string"],
        "uniqueItems": False,
        "minItems": 0,
        "minLength": 0,
        "pattern": "",
        "maxItems": 3.0,
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "$id": "https://example.com/thing",
        "$comment": "c",
        "$vocabulary": {"x": True},
        "title": "T",
        "description": "d",
        "default": {"type": 5},
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "contentEncoding": "base64",
        "contentMediaType": "image/png",
        "contentSchema": {"not": {"type": "string"}},
        "x-order": 3,
        "nullable": False,
        "example": "e",
        "externalDocs": {"url": "u"},
        "xml": {"name": "n"},
        "enumNames": ["a"],
        "x-guidance": {"whitespace_pattern": "z"},
        "type": "string",
    },
    "unknown formats": record(
        a={"type": "string", "format": "slug"},
        b={"type": "integer", "format": "uint32"},
        c={"type": "string", "format": "json-pointer"},
        d={"type": "string", "format": 5},
    ),
    "empty lists and objects": {
        "type": "object",
        "required": [],
        "properties": {},
        "patternProperties": {},
        "allOf": [],
        "dependentRequired": {},
        "dependencies": {"a": []},
        "minProperties": 0,
        "$defs": {},
    },
    "null for what is not said": {
        "type": "object",
        "properties": {"a": {"type": "string", "enum": None, "maxLength": None}},
        "required": None,
        "additionalProperties": None,
        "$defs": None,
    },
    "properties as PHP writes none": {"type": "object", "properties": [], "required": []},
    "keywords of other types": {
        "type": "integer",
        "uniqueItems": True,
        "pattern": "^(?=x)",
        "propertyNames": {"minLength": 2},
        "contains": {"type": "null"},
    },
    "names that are texts": {
        "type": "object",
        "propertyNames": {"type": "string", "description": "key"},
        "additionalProperties": {"type": "number"},
    },
    "conditions without consequence": {"if": {"type": "string"}, "type": "null", "then": None},
    "not nothing": {"not": False, "type": "boolean"},
    "nothing unevaluated": {**record(a=DIGIT), "unevaluatedProperties": False},
    "anything unevaluated": {"allOf": [record(a=DIGIT)], "unevaluatedProperties": True},
    "contained or not": {"type": "array", "contains": {"type": "string"}, "minContains": 0},
    "definitions that nothing uses": {
        "type": "string",
        "$defs": {"odd": {"not": {"type": "null"}, "pattern": "(?<!a)b"}},
        "definitions": {"none": False},
    },
    "bounds beyond any float": {
        "type": "number",
        "minimum": -1.7976931348623157e308,
        "maximum": 1.7976931348623157e308,
    },
    "bounds of whole numbers": record(
        a={"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    ),
    "bounds of draft 4": {
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "exclusiveMaximum": False,
    },
    "no reference cycles": {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "kin": {"type": "array", "items": {"$ref": "#"}}},
    },
}


@pytest.mark.parametrize("case", NOTHING_ASKED)
def test_what_asks_for_nothing_is_accepted(guides, case):
    guide = compiled(guides, NOTHING_ASKED[case])
    for seed in range(3):
        assert isinstance(json.loads(walked(guide, seed)), object)


UNENFORCED = {
    "a look ahead": (record(to={"type": "string", "pattern": r"^(?!\.)\w+$"}), "to", "pattern"),
    "a look behind": (record(a={"pattern": "(?<=a)b"}), "a", "pattern"),
    "an edge of a word": (record(a={"pattern": r"\bfoo"}), "a", "pattern"),
    "an earlier group": (record(a={"type": "string", "pattern": r"(.)\1"}), "a", "pattern"),
    "unique items": (record(tags={"type": "array", "uniqueItems": True}), "tags", "uniqueItems"),
    "all alternatives but null": (
        record(a={"anyOf": [{"type": "string", "pattern": "(?=a)"}, {"type": "null"}]}),
        "a/anyOf/0",
        "pattern",
    ),
    "no names": (
        record(a={"propertyNames": {"type": "null"}}),
        "a",
        "propertyNames",
    ),
    "a complement": (record(a={"not": {"type": "null"}}), "a", "not"),
    "a condition": (record(a={"if": {"type": "null"}, "then": True}), "a", "if"),
    "a contained item": (record(a={"type": "array", "contains": DIGIT}), "a", "contains"),
    "dependent names": (record(a={"dependentRequired": {"x": ["y"]}}), "a", "dependentRequired"),
    "names of draft 4": (record(a={"dependencies": {"x": ["y"]}}), "a", "dependencies"),
    "names of a form": (record(a={"propertyNames": {"format": "date"}}), "a", "propertyNames"),
    "a dynamic reference": (record(a={"$dynamicRef": "#x"}), "a", "$dynamicRef"),
    "a reference elsewhere": (record(a={"$ref": "https://example.com/s"}), "a", "$ref"),
    "a reference to nothing": (record(a={"$ref": "#/$defs/none"}), "a", "$ref"),
    "alternatives that overlap": (record(a={"oneOf": [DIGIT, {"type": "number"}]}), "a", "oneOf"),
    "a type that is none": (record(a={"type": "STRING"}), "a", "type"),
    "a count that is none": (record(a={"type": "string", "maxLength": "5"}), "a", "maxLength"),
    "a value that is not exact": (record(a={"const": 2**60 + 1}), "a", "const"),
    "a schema that is none": (record(a=5), "a", "schema"),
    "what the library finds": (record(a={"type": "string", "pattern": "("}), "a", "unclosed"),
    "patterns that overlap": (
        record(a={"patternProperties": {"^a": DIGIT, "^ab": {"type": "null"}}}),
        "a",
        "disjoint",
    ),
    "some of the properties": (
        record(a={"type": "object", "properties": {"x": {}, "y": {}}, "minProperties": 1}),
        "a",
        "minProp|min/maxProp",
    ),
}


@pytest.mark.parametrize("case", UNENFORCED)
def test_what_cannot_be_enforced_is_refused_by_its_name_and_place(guides, case):
    schema, place, named = UNENFORCED[case]
    with pytest.raises(RequestError, match=named.replace("$", r"\$")) as fault:
        compiled(guides, schema)
    assert (fault.value.status, fault.value.field) == ("INVALID_ARGUMENT", FIELD)
    assert f"#/properties/{place}" in str(fault.value)


def test_the_place_of_a_fault_leads_through_references(guides):
    schema = {"$defs": {"a/b": {"items": {"pattern": "(?=x)"}}}, "$ref": "#/$defs/a~1b"}
    with pytest.raises(RequestError, match="pattern at #/\\$defs/a~1b/items cannot"):
        compiled(guides, schema)


ENDLESS = {
    "each needs the other": {
        "$defs": {
            "hen": record(egg={"$ref": "#/$defs/egg"}),
            "egg": record(hen={"$ref": "#/$defs/hen"}),
        },
        "$ref": "#/$defs/egg",
    },
    "itself": record(again={"$ref": "#"}),
    "a list of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
    "a tuple of itself": {"type": "array", "prefixItems": [DIGIT, {"$ref": "#"}], "minItems": 2},
    "all its alternatives": {"anyOf": [record(a={"$ref": "#"}), record(b={"$ref": "#"})]},
    "through other names": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"$ref": "#"},
    },
    "an unnamed property": {
        "type": "object",
        "required": ["x"],
        "additionalProperties": {"$ref": "#"},
    },
    "what two parts ask": {
        "$defs": {
            "base": {"type": "object", "properties": {"x": {"$ref": "#/$defs/more"}}},
            "more": {"allOf": [{"$ref": "#/$defs/base"}, {"required": ["x"]}]},
        },
        "$ref": "#/$defs/more",
    },
    "an alternative of itself": {"anyOf": [{"$ref": "#"}]},
}
CONTRADICTORY = {
    "false": False,
    "the complement of all": {"not": {}},
    "required and forbidden": {**record(a=DIGIT), "properties": {"a": False}},
    "required and not named": {**record(a=DIGIT), "required": ["b"]},
    "values of another type": {"type": "integer", "enum": ["1", None]},
    "no common value": {"allOf": [{"enum": ["a", "b"]}, {"const": "c"}]},
    "no common type": {"allOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
    "no length": {"type": "string", "minLength": 4, "maxLength": 3},
    "no count": {"type": "array", "minItems": 4, "maxItems": 3},
    "no item": {"type": "array", "items": False, "minItems": 1},
    "no number": {"type": "number", "minimum": 2, "maximum": 1},
    "no whole number": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5},
    "no multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
    "no values": {"enum": []},
    "fewer than required": {**record(a=DIGIT, b=DIGIT), "maxProperties": 1},
    "a constant that is too long": {"type": "string", "const": "abcd", "maxLength": 3},
    "within a reference": {"$defs": {"no": {"type": "null", "const": 1}}, "$ref": "#/$defs/no"},
}


@pytest.mark.parametrize("case", {**ENDLESS, **CONTRADICTORY})
def test_what_no_finite_json_matches_is_refused(guides, case):
    with pytest.raises(RequestError) as fault:
        compiled(guides, {**ENDLESS, **CONTRADICTORY}[case])
    assert (fault.value.status, fault.value.field) == ("INVALID_ARGUMENT", FIELD)
    assert ("finite" in str(fault.value)) == (case in ENDLESS)


NODE = {"value": DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
FINITE = {
    "a list with an end": {"$defs": {"node": record(**NODE)}, "$ref": "#/$defs/node"},
    "an optional property": {**record(a=DIGIT), "properties": {"a": DIGIT, "b": {"$ref": "#"}}},
    "a type that ends": {**record(a={"$ref": "#"}), "type": ["object", "null"]},
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "an alternative without an end": {
        "$defs": {"endless": record(more={"$ref": "#/$defs/endless"})},
        "anyOf": [DIGIT, {"$ref": "#/$defs/endless"}],
    },
    "a property without an end": {
        "$defs": {"endless": record(more={"$ref": "#/$defs/endless"})},
        **record(a=DIGIT),
        "properties": {"a": DIGIT, "b": {"type": "array", "items": {"$ref": "#/$defs/endless"}}},
    },
    "a property that nothing matches": {
        "$defs": {"never": {"not": {}}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/never"}, "b": {"type": "string", "enum": [1]}},
        "additionalProperties": False,
    },
    "a sibling": {**record(a=DIGIT, b={"$ref": "#/properties/a", "description": "also"})},
    "an entry of a list": {
        "type": "object",
        "properties": {
            "a": {"anyOf": [DIGIT, {"type": "null"}]},
            "b": {"$ref": "#/properties/a/anyOf/1"},
        },
        "additionalProperties": False,
    },
    "escaped names": {"$defs": {"x~y/%z é": DIGIT}, "$ref": "#/$defs/x~0y~1%25z%20%C3%A9"},
    "older definitions": {
        "definitions": {"a": {"definitions": {"b": DIGIT}}},
        "$ref": "#/definitions/a/definitions/b",
    },
    "an anchor": {"$defs": {"a": {"$anchor": "here", **DIGIT}}, "$ref": "#here"},
    "an anchor of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "definitions": {"a": {"id": "#here", **DIGIT}},
        "$ref": "#here",
    },
    "addresses": {
        "$id": "https://example.com/root.json",
        "$defs": {"a": {"$id": "part.json", "$defs": {"n": DIGIT}, "$ref": "#/$defs/n"}},
        "$ref": "https://example.com/part.json",
    },
    "all of several": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"properties": {"b": DIGIT}, "required": ["b"]},
        ]
    },
    "tuples of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [DIGIT, {"type": "null"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "values of several types": {"enum": ["x", 1, 2.5, None, True, [1], {"a": []}]},
    "titled constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "models told apart by a name": {
        "$defs": {
            kind: {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: DIGIT},
                "required": ["kind", kind],
            }
            for kind in ("cat", "dog")
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    },
    "names of a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": DIGIT,
    },
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[xy]$"},
        "additionalProperties": DIGIT,
    },
    "names of a length": {
        "type": "object",
        "propertyNames": {"type": "string", "minLength": 1, "maxLength": 2},
        "additionalProperties": DIGIT,
    },
    "an alternative that cannot be enforced": {
        "anyOf": [
            {"type": "number"},
            {"type": "string", "pattern": r"^(?![-+.]*$)[+-]?\d*\.?\d*$"},
            {"oneOf": [{"type": "array", "uniqueItems": True}, {"minLength": 1}]},
            {"type": "null"},
        ]
    },
    "names of a reference": {
        "$defs": {"names": {"type": "string", "enum": ["a"]}},
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/names"},
        "additionalProperties": {"type": "array", "items": DIGIT},
    },
    "odd names": {**record(**{"$ref": DIGIT, "type": DIGIT, "a.b/c~d": DIGIT, "": DIGIT})},
}


@pytest.mark.parametrize("case", FINITE)
def test_what_has_an_end_reaches_one_and_is_valid(guides, case):
    guide = compiled(guides, FINITE[case])
    for seed in range(6):
        text = walked(guide, seed)
        assert text is not None, case
        assert jsonschema_rs.validator_for(FINITE[case]).is_valid(json.loads(text)), text


def test_models_are_told_apart_by_what_openapi_says_if_they_may_leave_it_out(guides):
    """Pydantic does not require a tag that has a default."""
    kinds = {
        kind: {"type": "object", "properties": {"kind": {"const": kind, "default": kind}}}
        for kind in ("cat", "dog")
    }
    alternatives = {"$defs": kinds, "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}
    with pytest.raises(RequestError, match="oneOf at #"):
        compiled(guides, alternatives)
    tagged = {**alternatives, "discriminator": {"propertyName": "kind"}}
    guide = compiled(guides, tagged)
    assert follows(guide.matcher(), '{"kind":"dog"}') and not follows(guide.matcher(), "{}")


# --- tools

GOOD = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}, "required": ["city"]}
ODD = {
    "type": "object",
    "properties": {"to": {"type": "string", "pattern": "^(?!x)"}, "n": {"enum": [1, 2]}},
    "required": ["to"],
}
BROKEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}


def tool(name, parameters, **more):
    return {"function": {"name": name, "parameters": parameters, **more}}


def called(name, arguments):
    return json.dumps({"name": name, "arguments": arguments})


def test_a_keyword_of_one_tool_does_not_free_the_others(guides, caplog):
    tools = [tool("weather", GOOD), tool("mail", ODD), tool("break", BROKEN)]
    with caplog.at_level(logging.WARNING):
        guide = guides.compile(forced_call(tools, None))
    for name, arguments, fits in (
        ("weather", {"city": "Oslo"}, True),
        ("weather", {"city": "Rome"}, False),
        ("mail", {"to": "x", "n": 2}, True),
        ("mail", {"to": "x", "n": 3}, False),
        ("mail", {"n": 2}, False),
        ("break", {"any": [1]}, True),
        ("break", [], False),
    ):
        assert follows(guide.matcher(), called(name, arguments)) == fits, (name, arguments)
    assert caplog.text.count("pattern of a tool") == 1
    guides.compile(forced_call(tools, "mail"))
    assert caplog.text.count("pattern of a tool") == 1


def test_a_strict_tool_is_refused_by_its_name(guides):
    for parameters, named in ((ODD, "pattern at #/properties/to"), (BROKEN, "unclosed")):
        tools = [tool("weather", GOOD, strict=True), tool("mail", parameters, strict=True)]
        for guide in (
            forced_call(tools, None),
            calls_guide(tools, "<tool_call>", "</tool_call>", False),
        ):
            with pytest.raises(RequestError, match=named) as fault:
                guides.compile(guide, "tools")
            assert fault.value.field == "tools" and "'mail'" in str(fault.value)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        True,
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": None, "required": None},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"type": ["object", "null"]},
        {"type": "object", "properties": {"a": {"type": "dict"}}},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"anyOf": [{"$ref": "#/$defs/none"}]},
        {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 10_000}}},
    ],
    ids=str,
)
def test_whatever_the_parameters_of_a_tool_are_its_calls_have_an_object(guides, parameters):
    guide = guides.compile(forced_call([tool("f", parameters), tool("g", GOOD)], "f"))
    for seed in range(3):
        made = json.loads(walked(guide, seed))
        assert made["name"] == "f" and isinstance(made["arguments"], dict)


def test_parts_of_a_tools_object_are_not_closed_against_each_other(guides):
    parameters = {
        "$defs": {"base": {"type": "object", "properties": {"a": DIGIT}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": DIGIT}, "required": ["b"]}],
        "properties": {"in": {"type": "object", "properties": {"c": DIGIT}}},
    }
    guide = guides.compile(forced_call([tool("f", parameters)], None))
    assert follows(guide.matcher(), called("f", {"a": 1, "b": 2, "in": {"c": 1}}))
    assert not follows(guide.matcher(), called("f", {"a": 1, "b": 2, "in": {"d": 1}}))


# --- any schema

names = st.sampled_from(["a", "b", "c", "$ref", "x y"])
values = st.sampled_from(["a", "", "bc", 0, 1, -3, 2.5, True, None, [], [1], {}, {"a": 1}])
counts = st.integers(0, 3)
keywords = {
    "type": st.sampled_from(
        [
            "object",
            "array",
            "string",
            "integer",
            "number",
            "boolean",
            "null",
            "any",
            ["object", "null"],
            ["string", "integer"],
            [],
        ]
    ),
    "const": values,
    "enum": st.lists(values, max_size=3),
    "minLength": counts,
    "maxLength": counts,
    "pattern": st.sampled_from(["", "^a", "b$", "^[ab]+$", "(?=a)", "("]),
    "format": st.sampled_from(["date", "ipv4", "path", "byte"]),
    "minimum": st.integers(-9, 9),
    "maximum": st.integers(-9, 9),
    "exclusiveMinimum": st.sampled_from([0, 5]),
    "multipleOf": st.sampled_from([1, 2, 5, 0]),
    "minItems": counts,
    "maxItems": counts,
    "uniqueItems": st.booleans(),
    "minProperties": counts,
    "maxProperties": counts,
    "required": st.lists(names, max_size=2),
    "title": st.just("t"),
    "default": values,
    "nullable": st.booleans(),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/none"]),
    "dependentRequired": st.just({"a": ["b"]}),
}


def parts(inner):
    nested = {
        "properties": st.dictionaries(names, inner, max_size=3),
        "$defs": st.dictionaries(names, inner, max_size=2),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^b"]), inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "items": inner,
        "prefixItems": st.lists(inner, max_size=2),
        "allOf": st.lists(inner, max_size=2),
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=2),
        "not": inner,
    }
    some = st.lists(st.sampled_from([*keywords, *nested]), unique=True, max_size=5)
    every = {**keywords, **nested}
    return some.flatmap(
        lambda chosen: st.fixed_dictionaries({name: every[name] for name in chosen})
    )


any_schema = st.recursive(st.one_of(st.booleans(), parts(st.booleans())), parts, max_leaves=8)


def within_floats(digits: str) -> float:
    return max(min(float(digits), HUGE), -HUGE)


def distinct(pairs):
    """An object whose names are distinct, which guides do not promise. Errors: KeyError."""
    if len(dict(pairs)) < len(pairs):
        raise KeyError
    return dict(pairs)


@settings(max_examples=examples(300), deadline=None)
@given(schema=any_schema, seed=st.integers(0, 2**32))
def test_any_schema_is_refused_or_reaches_an_end_and_is_obeyed(guides, schema, seed):
    try:
        guide = compiled(guides, schema)
    except RequestError as error:
        assert (error.status, error.field) == ("INVALID_ARGUMENT", FIELD)
        return
    text = walked(guide, seed)
    assert text is not None, schema
    try:
        value = json.loads(text, parse_float=within_floats, object_pairs_hook=distinct)
    except KeyError:
        return
    try:
        validator = jsonschema_rs.Draft202012Validator(schema)
    except (ValueError, jsonschema_rs.ReferencingError):  # a part that asks for nothing is wrong
        return
    assert validator.is_valid(value), (schema, text)
