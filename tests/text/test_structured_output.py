"""Outputs that matchers let through are valid; guides are refused at once and by name."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import jsonschema_rs
import numpy as np
import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output import Guided, Guides, limits, spec
from jaxserve.text.structured_output.tools import calls_guide, forced_call
from tests.examples import examples
from tests.text.vocabulary import EOS, tokenizer

VOCAB = 512
HUGE = 1e308
CLOSING = ['"}', '"', "}", "]", ":", '":', ",", "0"]  # what brings most texts to an end


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(tokenizer(), VOCAB, (EOS,))


def allowed(matcher) -> list[int]:
    row = np.zeros(VOCAB // 32, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(matcher, seed: int, free: int, most: int = 300) -> list[int] | None:
    """Random tokens that are allowed; after `free` of them those that end things are preferred.
    None where no end is in sight."""
    rng = random.Random(seed)
    ids = []
    closing = [tokenizer().encode(text, special=False)[0] for text in CLOSING]
    while not matcher.done:
        if len(ids) == most:
            return None
        may = allowed(matcher)
        assert may and max(may) < tokenizer().vocab and not {0, 1} & set(may), (
            "an id without text may come"
        )
        ending = [token for token in (EOS, *closing) if token in may] if len(ids) >= free else []
        ids.append(ending[0] if ending and rng.random() < 0.8 else rng.choice(may))
        matcher.push(ids[-1])
    return ids


def follows(matcher, text: str) -> bool:
    """Returns True if the matcher lets the text through."""
    for token in tokenizer().encode(text, special=False):
        if token not in allowed(matcher):
            return False
        matcher.push(token)
    return True


def said(matcher, seed: int, free: int) -> str:
    ids = walk(matcher, seed, free)
    assume(ids is not None)
    return tokenizer().decode(ids)


names = st.text('abcué😀"\\ ', min_size=1, max_size=4)
scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "number"}),
    st.just({"type": "string"}),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-999, 999),
        st.integers(-999, 999),
    ),
    st.builds(
        lambda m: {"type": "integer", "multipleOf": m, "minimum": 0, "maximum": 999},
        st.integers(1, 30),
    ),
    st.builds(
        lambda a, b: {"type": "string", "minLength": min(a, b), "maxLength": max(a, b)},
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{2,4}-\\d+$"},
            {"type": "string", "pattern": "x|yz"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "ipv4"},
        ]
    ),
    st.lists(
        st.one_of(names, st.integers(-5, 5), st.booleans(), st.none()), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    names.map(lambda value: {"const": value}),
)


def objects(inner):
    def build(properties, required, more):
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": more,
        }

    fields = st.dictionaries(names, inner, max_size=3)
    return st.builds(build, fields, st.frozensets(names), st.one_of(st.booleans(), inner))


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda items, a, b: {
                "type": "array",
                "items": items,
                "minItems": min(a, b),
                "maxItems": max(a, b),
            },
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        inner.map(
            lambda part: {
                "$defs": {"part": part},
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/part"}},
                "required": ["a"],
            }
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    schema=schemas.filter(lambda schema: "$defs" not in json.dumps(schema)[2:]),
    seed=st.integers(0, 2**32),
    free=st.integers(0, 30),
)
def test_what_a_schema_lets_through_is_valid(guides, schema, seed, free):
    text = said(guides.compile(Guided("json_schema", json.dumps(schema))).matcher(), seed, free)
    # JSON's numbers know no infinity
    value = json.loads(text, parse_float=lambda digits: max(min(float(digits), HUGE), -HUGE))
    assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value), (
        schema,
        text,
    )


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), free=st.integers(0, 30))
def test_any_object_is_an_object(guides, seed, free):
    assert isinstance(
        json.loads(said(guides.compile(Guided("json_object")).matcher(), seed, free)), dict
    )


regexes = st.recursive(
    st.sampled_from(
        ["a", "b", "é", "😀", "[a-c]", "[^a]", r"\d", "[a-z0-9_]", ".", r"\.", " ", '"', "tr"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(regex=regexes, seed=st.integers(0, 2**32), free=st.integers(0, 30))
def test_what_a_regular_expression_lets_through_matches_it(guides, regex, seed, free):
    text = said(guides.compile(Guided("regex", regex)).matcher(), seed, free)
    # digits that this Python does not know
    newer = "".join("0" if unicodedata.category(char) == "Cn" else char for char in text)
    assert re.fullmatch(regex, text) or re.fullmatch(regex, newer), (regex, text)


@settings(max_examples=examples(60), deadline=None)
@given(
    choices=st.lists(
        st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable() or "\n" in text),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_one_of_the_choices_comes_and_each_can(guides, choices, seed):
    assume(
        all(
            tokenizer().decode(tokenizer().encode(choice, special=False)) == choice
            for choice in choices
        )
    )
    guide = guides.compile(Guided("choice", choices=tuple(choices)))
    assert said(guide.matcher(), seed, 0) in choices
    for choice in choices:
        matcher = guide.matcher()
        for token in tokenizer().encode(choice, special=False):
            assert not matcher.done
            matcher.push(token)
        assert matcher.done or EOS in allowed(matcher)


def test_a_grammar_is_followed(guides):
    guide = guides.compile(
        Guided("grammar", 'start: sum "."\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/')
    )
    for seed in range(20):
        assert re.fullmatch(
            r"\d{1,3}(\+\d{1,3})*\.", tokenizer().decode(walk(guide.matcher(), seed, 5))
        )


@pytest.mark.parametrize(
    "grammar",
    [
        'start: item ("," start)?\nitem: /[a-z]/ // start: start',
        'start: pair | LEAF\npair: "(" start "," start ")"\nLEAF: /[0-9]/\n%ignore " "',
        '?start: sum\nsum: sum "+" one -> add\n  | one\none: "1" | "(" sum ")"',
        'start: "a: b" start~0..2',
        'start: [rest] "a"\nrest: ("b" rest)* "c"',
        'start: kebab-case\nkebab-case: "x" | "y" kebab-case',
    ],
)
def test_recursion_that_ends_is_taken(guides, grammar):
    assert allowed(guides.compile(Guided("grammar", grammar)).matcher())


def test_matchers_of_one_guide_do_not_know_each_other(guides):
    guide = guides.compile(Guided("regex", "ab|cd"))
    one = guide.matcher()
    other = guide.matcher()
    before = allowed(other)
    one.push(tokenizer().encode("ab", special=False)[0])
    assert one.done and not other.done and allowed(other) == before


def test_an_end_token_ends_a_completion_and_nothing_else_may_follow(guides):
    matcher = guides.compile(Guided("regex", "a*")).matcher()
    matcher.push(tokenizer().encode("a", special=False)[0])
    matcher.push(EOS)
    assert matcher.done
    matcher = guides.compile(Guided("regex", "a")).matcher()
    with pytest.raises(RequestError) as fault:
        matcher.push(tokenizer().encode("b", special=False)[0])
    assert fault.value.field == "guided"


def test_words_beyond_the_vocabulary_are_cleared(guides):
    row = np.full(VOCAB // 32 + 5, -1, np.int32)
    guides.compile(Guided("regex", ".*")).matcher().fill(row)
    assert not row[VOCAB // 32 :].any() and row[: VOCAB // 32].any()


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"▁abc{}:0",
        "ab",
        "▁ab",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 10],
    "tokenizer.ggml.scores": [0.0] * 269,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
}


def test_sentencepiece_tokenizers_can_be_guided():
    from jaxserve.text.vocabulary import from_fields

    mine = Tokenizer(from_fields(SENTENCEPIECE), {})
    regex = r"(ab c|\{a:0\}|é)+"
    guide = Guides(mine, 320, (2,)).compile(Guided("regex", regex))
    for seed in range(10):
        matcher = guide.matcher()
        ids = []
        rng = random.Random(seed)
        while not matcher.done and len(ids) < 200:
            row = np.zeros(10, np.int32)
            matcher.fill(row)
            may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            ids.append(2 if 2 in may else rng.choice(may))
            matcher.push(ids[-1])
        assert re.fullmatch(regex, mine.decode(ids))


def test_a_model_without_tokenizer_or_end_says_so():
    for guides in (
        Guides(None, VOCAB, (EOS,)),
        Guides(tokenizer(), VOCAB, ()),
    ):
        with pytest.raises(RequestError) as fault:
            guides.compile(Guided("json_object"), "response_format")
        assert (fault.value.status, fault.value.field) == ("FAILED_PRECONDITION", "response_format")


@pytest.mark.parametrize("vocab", [256, 275, VOCAB])  # the tokenizer has 284
def test_a_model_with_fewer_or_more_ids_than_its_tokenizer_is_guided_within_its_own(vocab):
    guides = Guides(tokenizer(), vocab, (EOS,))
    matcher = guides.compile(Guided("regex", "[a-z]*")).matcher()
    row = np.full(-(-vocab // 32) + 1, -1, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    assert {EOS, *tokenizer().encode("a", special=False)} <= set(allowed.tolist())
    assert allowed.max() < min(vocab, tokenizer().vocab)
    guides.close()


def test_a_guide_that_goes_on_beyond_the_models_ids_is_refused_by_name():
    guides = Guides(tokenizer(), 40, (EOS,))
    matcher = guides.compile(Guided("regex", "é+")).matcher()
    with pytest.raises(RequestError, match="tokens that the model does not have"):
        matcher.fill(np.zeros(2, np.int32))
    guides.close()


def test_min_tokens_and_a_guide_exclude_each_other(guides):
    guide = guides.compile(Guided("json_object"))
    with pytest.raises(RequestError, match="min_tokens"):
        Request.make("r", [5], SamplingParams(min_tokens=2), vocab=VOCAB, max_len=64, guide=guide)


def nested(depth: int, inner: str = "{}") -> str:
    return '{"type":"array","items":' * depth + inner + "}" * depth


def chained(count: int, levels: int) -> str:
    """References that lead on to each other, each through some levels."""
    part = lambda number: json.loads(
        nested(levels, json.dumps({"$ref": f"#/$defs/d{(number + 1) % count}"}))
    )
    return json.dumps({"$defs": {f"d{i}": part(i) for i in range(count)}, "$ref": "#/$defs/d0"})


def relative(count: int, levels: int) -> str:
    """The same, each by the same words: every part has an address that its reference is relative
    to."""
    part = lambda number: f'{{"$id":"x:/{"b/" * number}",' + nested(levels, '{"$ref":"b/"}')[1:]
    return json.dumps(
        {
            "$defs": {f"d{i}": json.loads(part(i)) for i in range(count)}
            | {"end": {"$id": "x:/" + "b/" * count}},
            "$ref": "x:/",
        }
    )


def combined(widths: list[int], values: int) -> str:
    """Alternatives of which every combination is a schema of its own."""
    parts = [{"anyOf": [{"type": "object"}] * width} for width in widths]
    return json.dumps(
        {"allOf": [*parts, {"type": "object", "properties": {"a": {"enum": [1] * values}}}]}
    )


def rules(count: int, upper: bool = False) -> str:
    name = "R" if upper else "r"
    return (
        f"start: {name}0\n"
        + "\n".join(f'{name}{i}: {name}{i + 1} "x"?' for i in range(count))
        + f'\n{name}{count}: "a"'
    )


WRONG = {
    "not json": ("json_schema", "{"),
    "no schema": ("json_schema", "3"),
    "null": ("json_schema", "null"),
    "NaN": ("json_schema", '{"const": NaN}'),
    "unknown keyword": ("json_schema", '{"not": {"type": "string"}}'),
    "unsatisfiable": ("json_schema", "false"),
    "more than a schema": ("json_schema", '{}}], "max_tokens": 3}'),
    "elsewhere": ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "relative references": ("json_schema", relative(40, 40)),
    "bad regex": ("regex", "("),
    "look-ahead": ("regex", "(?=a)b"),
    "back reference": ("regex", r"(a)\1"),
    "nothing": ("regex", r"[^\s\S]"),
    "half a character": ("regex", "\ud800"),
    "bad grammar": ("grammar", 'start: "a'),
    "no start": ("grammar", 'a: "b"'),
    "another grammar": ("grammar", '{"grammars": [{"json_schema": {}}]}'),
    "embedded": ("grammar", 'start: %json {"type": "object"}'),
    "empty": ("grammar", "start: a\na: a"),
    "endless": ("grammar", "start: WORD start\nWORD: /[a-z]+ /"),
    "endless together": ("grammar", 'start: a\na: /b+/ b | b\nb: (/c+/ "," (a ";")+ | a)'),
    "an endless alternative": ("grammar", 'start: a | "end"\na: /b+/ a "c"?'),
    "an endless option": ("grammar", 'start: "x" [a]\na: a{1,3} /b+/'),
}
BOMBS = {
    "deep": ("json_schema", nested(10_000)),
    "brackets": ("json_schema", "[" * 60_000),
    "references": ("json_schema", chained(1500, 0)),
    "deep references": ("json_schema", chained(40, 40)),
    "huge enum": ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(10**5)]})),
    "product": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{c}{i}": {"type": "null"}}} for c in "ab"]}
                    for i in range(30)
                ]
            }
        ),
    ),
    "combinations": ("json_schema", combined([30, 30, 30], 800)),
    "two of them": ("json_schema", combined([100, 100], 600)),
    "items": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"type": "array", "items": {"enum": [1] * 4000}},
                    {"type": "array", "prefixItems": [True] * 1500},
                ]
            }
        ),
    ),
    "at least one": (
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {f"a{i}": {} for i in range(1024)},
                "additionalProperties": False,
                "minProperties": 1,
            }
        ),
    ),
    "wide": ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(4000)}})),
    "optional": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}),
    ),
    "aliases": (
        "grammar",
        "start: R0 -> x "
        + " ".join(f'R{i}: R{i + 1} "x"? -> x' for i in range(2000))
        + ' R2000: "a"',
    ),
    "no rule": ("grammar", "a" * 65_000),
    "many strings": ("grammar", "start: " + '"\\"' * 20_000),
    "patterns": (
        "json_schema",
        json.dumps({"patternProperties": {f"^a{i}$": {} for i in range(1000)}}),
    ),
    "negative multiple": ("json_schema", '{"type": "integer", "multipleOf": -999983}'),
    "infinite": ("json_schema", '{"multipleOf": 1e999}'),
    "multiple": ("json_schema", '{"type": "integer", "multipleOf": 999983}'),
    "multiples": (
        "json_schema",
        '{"allOf": [{"type": "integer", "multipleOf": 991}, {"multipleOf": 997}]}',
    ),
    "digits": ("json_schema", '{"type": "integer", "minimum": ' + "9" * 5000 + "}"),
    "places": ("json_schema", '{"multipleOf": 1e-300}'),
    "repeats": ("regex", "((a{1000}){1000}){1000}"),
    "optional repeats": ("regex", "(a?){5000}a{5000}"),
    "huge repeat": ("regex", "a{4294967295}"),
    "parentheses": ("regex", "(" * 20_000 + ")" * 20_000),
    "long": ("regex", "a" * 70_000),
    "pattern": (
        "json_schema",
        json.dumps({"type": "string", "pattern": "x((a{1000}){1000}){1000}"}),
    ),
    "rules": ("grammar", rules(5000)),
    "terminals": ("grammar", rules(5000, upper=True)),
    "some terminals": ("grammar", rules(1000, upper=True)),
    "doubling": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
    ),
    "repeated rules": ("grammar", 'start: (("a"{1000}){1000}){1000}'),
    "products": ("grammar", "start: T\nT: /(.*a){20}/ & ~/(.*c){20}/"),
    "grammar parentheses": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_name(guides, case):
    with pytest.raises(RequestError) as fault:
        guides.compile(Guided(*WRONG[case]), "response_format.schema")
    assert (fault.value.status, fault.value.field) == ("INVALID_ARGUMENT", "response_format.schema")
    assert len(str(fault.value)) < 400 and "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "spec,message",
    [
        (Guided("xml"), "not one of"),
        (Guided("choice"), "1 to 1024"),
        (Guided("choice", choices=("a",) * 1025), "1 to 1024"),
        (Guided("choice", choices=("a", "")), "empty"),
        (Guided("choice", choices=("x" * 70_000,)), "limit is 65536"),
        (Guided("regex", 3), "must be text"),
        (Guided("choice", choices=["a"]), "must be text"),
    ],
    ids=str,
)
def test_what_is_no_spec_is_refused(guides, spec, message):
    with pytest.raises(RequestError, match=message):
        guides.compile(spec)


def test_bombs_end_at_once_in_little_memory_and_hurt_nobody():
    """In a process of its own: native code that overflows its stack would end whatever calls it."""
    code = "from tests.text.test_structured_output import explode; explode()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert (
        set(said["refused"]) | set(said["followed"]) == set(BOMBS) and len(said["followed"]) < 4
    ), said
    assert max(said["seconds"].values()) < 5, said["seconds"]
    assert said["MiB"] < 150


def explode() -> None:
    """Every bomb, on a thread with a small stack, and what became of it. Those that compile are
    followed for some tokens."""
    import resource

    out: dict = {"refused": {}, "followed": {}, "seconds": {}}
    guides = Guides(tokenizer(), VOCAB, (EOS,))
    guides.compile(Guided("json_object"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run() -> None:
        for name, bomb in BOMBS.items():
            start = time.process_time()
            try:
                walk(guides.compile(Guided(*bomb)).matcher(), 0, 10, most=50)
                out["followed"][name] = ""
            except RequestError as error:
                out["refused"][name] = str(error)
            out["seconds"][name] = time.process_time() - start

    threading.stack_size(1 << 20)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    out["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps(out))


def test_what_is_just_within_the_limits_is_taken(guides):
    deepest = json.loads(nested(limits.MAX_DEPTH - 1))
    properties = {f"p{i}": {"type": "null"} for i in range(300)}
    for schema in (
        deepest,
        {"type": "object", "properties": properties},
        json.loads(chained(150, 1)),
        json.loads(chained(30, 30)),
        json.loads(relative(30, 28)),
        {"multipleOf": 0.25},
        {"type": "integer", "multipleOf": limits.MAX_MULTIPLE},
        {"enum": [f"value {i}" for i in range(2000)]},
    ):
        assert allowed(guides.compile(Guided("json_schema", json.dumps(schema))).matcher())
    assert allowed(guides.compile(Guided("grammar", rules(spec.MAX_RULES - 2))).matcher())
    assert allowed(
        guides.compile(
            Guided("choice", choices=tuple(f"choice {i}" for i in range(spec.MAX_CHOICES)))
        ).matcher()
    )


def test_calls_of_strict_tools_obey_their_schemas_and_other_text_is_free(guides):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [
        {"function": {"name": "f", "parameters": schema, "strict": True}},
        {"function": {"name": "g", "parameters": schema}},
    ]
    guide = guides.compile(calls_guide(tools, "<tool_call>", "</tool_call>", False))
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    for text, fits in (
        ("any text", True),
        ("a " + call.format("f", '{"n": 1}') + call.format("g", '{"m": 1}') + " b", True),
        (call.format("f", '{"n": "x"}'), False),
        (call.format("f", '{"m": 1}'), False),
        (call.format("h", "{}"), False),
        ("<tool_call>text", False),
    ):
        assert follows(guide.matcher(), text) == fits, text


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{}",
        '{"begin": "", "end": "", "calls": []}',
        '{"begin": "<a>", "end": "", "calls": [1]}',
        '{"begin": 5, "end": "", "calls": [{"name": "f", "parameters": {}, "strict": true}]}',
        '{"begin": "x", "end": "", "calls": [{"name": 5, "parameters": {}, "strict": true}]}',
        '{"begin": "x", "end": "", "calls": [{"name": "f", "parameters": 5, "strict": true}]}',
    ],
)
def test_calls_that_are_malformed_are_refused(guides, text):
    with pytest.raises(RequestError, match="calls"):
        guides.compile(Guided("calls", text))


def test_tools_get_no_arguments_that_they_do_not_name(guides):
    def forced(parameters):
        tool = {"function": {"name": "f", "parameters": parameters}}
        return guides.compile(forced_call([tool], None))

    number = {"properties": {"n": {"type": "integer"}}}
    within = {"type": "object", "properties": {"o": {"type": "object", **number}}}
    merged = {"type": "object", "allOf": [number, {"properties": {"m": {"type": "integer"}}}]}
    required = {"type": "object", **number, "required": ["n", "m"]}
    for parameters, arguments, fits in (
        ({"type": "object", **number}, {"n": 1}, True),
        ({"type": "object", **number}, {"n": 1, "m": 1}, False),
        ({"type": "object", **number, "additionalProperties": True}, {"n": 1, "m": 1}, True),
        (within, {"o": {"m": 1}}, False),
        (within, {"o": {"n": 1}}, True),
        (merged, {"n": 1, "m": 1}, True),
        (required, {"n": 1, "m": 1}, True),
        ({"type": "object"}, {"any": 1}, True),
    ):
        for separators, may in (((",", ":"), True), ((", ", ": "), True), ((",\n", ":"), False)):
            text = json.dumps({"name": "f", "arguments": arguments}, separators=separators)
            fits_so = fits and may
            assert follows(forced(parameters).matcher(), text) == fits_so, (parameters, text)


def test_references_in_the_schema_of_a_function_stay_within_it(guides):
    part = lambda kind: {
        "type": "object",
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"X": {"type": kind}},
        "properties": {"x": {"$ref": "#/$defs/X"}, "more": {"$ref": "#"}},
    }
    tools = [
        {"function": {"name": kind, "parameters": part(kind)}} for kind in ("integer", "boolean")
    ]
    tools[0]["function"]["parameters"]["$schema"] = "http://json-schema.org/draft-07/schema#"
    guide = guides.compile(forced_call(tools, None))
    many = [
        {"function": {"name": f"f{number}", "parameters": {**part("integer"), "title": "x"}}}
        for number in range(100)
    ]
    assert allowed(guides.compile(forced_call(many, None)).matcher())
    for kind, x, more, fits in (
        ("integer", 1, 2, True),
        ("boolean", True, False, True),
        ("integer", True, 2, False),
        ("boolean", 1, True, False),
        ("integer", 1, True, False),
    ):
        text = json.dumps(
            {"name": kind, "arguments": {"x": x, "more": {"x": more}}}, separators=(",", ":")
        )
        assert follows(guide.matcher(), text) == fits, text


def test_a_guide_that_was_given_up_is_not_the_answer_to_the_next_one(monkeypatch):
    mine = Guides(tokenizer(), VOCAB, (EOS,))
    assert allowed(mine.compile(Guided("regex", "a")).matcher())
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("jaxserve.text.structured_output.sandbox.json.loads", interrupt)
        mine.compile(Guided("regex", "["))
    assert allowed(mine.compile(Guided("regex", "a")).matcher())
    with pytest.raises(RequestError):
        mine.compile(Guided("regex", "["))
    mine.close()
    with pytest.raises(RequestError) as fault:
        mine.compile(Guided("regex", "a"))
    assert fault.value.status == "INTERNAL"


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_process_that_compiles_may_be_killed_and_none_is_left(guides):
    mine = Guides(tokenizer(), VOCAB, (EOS,))
    digits = Guided("regex", "[0-9]+")
    before = set(psutil.Process().children())
    for _ in range(3):
        assert allowed(mine.compile(digits).matcher())
        (compiling,) = set(psutil.Process().children()) - before
        compiling.kill()
    bomb = Guided("json_schema", combined([30, 30, 30], 800))
    with pytest.raises(RequestError, match="to compile"):
        mine.compile(bomb)
    assert allowed(mine.compile(digits).matcher())
    mine.close()
    assert set(psutil.Process().children()) == before


def test_many_threads_may_compile_at_once(guides):
    out: list = []

    def run(number: int) -> None:
        matcher = guides.compile(Guided("regex", f"a{{{number + 1}}}")).matcher()
        out.append(len(tokenizer().decode(walk(matcher, number, 0))) == number + 1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert out == [True] * 16
