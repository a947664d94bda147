"""Answers of a model to prompts of the kinds that `drafts` asks, but not those, for an EAGLE head
to learn from: questions made of templates, and Python and texts of the standard library."""

from __future__ import annotations

import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from jaxserve.api.sampling import SamplingParams
from jaxserve.llm import LLM

PROMPTS = {"chat": 320, "edits": 200, "summaries": 160}
ANSWER = 192  # largest number of tokens
LONGEST = 640  # prompt and answer
HELD_OUT = 16  # prompts of each kind, of those that are answered greedily
WARM = 0.7  # temperature of every second answer
THINGS = """volcanoes, the printing press, chess, beekeeping, solar panels, black holes, jazz, yoga,
coral reefs, public libraries, electric cars, earthquakes, meditation, photosynthesis, coffee,
the immune system, origami, democracy, penguins, lighthouses, remote work, gardening, the brain,
inflation, databases, a lost robot, an old clockmaker, learning a language, swimming, the moon"""
FOODS = "lentil soup, apple pie, fried rice, pancakes, a bean salad, roast potatoes, lasagne"
CITIES = "Lisbon, Kyoto, Edinburgh, Istanbul, Montreal, Cape Town, Prague, Mexico City"
PAIRS = """tea and coffee, a virus and a bacterium, an atom and a molecule, RAM and a hard disk,
a crocodile and an alligator, a debit card and a credit card, a novel and a poem, jam and jelly,
speed and acceleration, a list and a tuple in Python, a lake and a pond, debt and equity"""
QUESTIONS = {  # what is asked of each of several things
    THINGS: (
        "Explain {} to a child.",
        "Tell me a story about {}.",
        "What are the advantages and disadvantages of {}?",
        "Give me five tips about {}.",
        "Write a poem about {}.",
        "Why does {} matter?",
        "What should I know about {}?",
        "Write an email to a friend about {}.",
        "What do people get wrong about {}?",
        "List ten facts about {}.",
    ),
    FOODS: ("Give me a recipe for {}.", "How do I make {} for eight people?"),
    CITIES: ("Plan a weekend in {}.", "What can two students do in {} with little money?"),
    PAIRS: ("What is the difference between {}?", "Compare {} in a few sentences."),
}
EDITS = ("Add a comment.", "Repeat this code.", "Add a docstring.", "Rename a variable.")
READINGS = ("Summarise this.", "Quote this.", "Repeat this text.", "What does this say?")
CHARACTERS = (300, 1200)  # of a text or a piece of code: fewest and most
UNUSED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer. begins: number of the prompt's tokens."""

    kind: str
    greedy: bool
    ids: list[int]
    begins: int


def answers_of(model: str, kept: str | None) -> list[Answer]:
    """Has the model answer all prompts, every second one greedily. kept: a file that holds the
    answers, and is written where it is missing."""
    if kept and Path(kept).exists():
        return [Answer(**each) for each in json.loads(Path(kept).read_text())]
    with LLM(
        model,
        profile="none",
        compile_all=False,
        max_seqs=64,
        max_model_len=LONGEST,
        kv_memory_gib=2.5,
    ) as llm:
        assert llm.tokenizer is not None, "it is no random model"
        prompts = []
        for kind, text in prompts_by_kind():
            ids = llm.tokenizer.chat([{"role": "user", "content": text}])
            if len(ids) + ANSWER <= LONGEST:
                prompts.append((kind, ids))
        sampling = [
            SamplingParams(temperature=WARM * (number % 2), max_tokens=ANSWER, seed=number)
            for number in range(len(prompts))
        ]
        completions = llm.generate([ids for _, ids in prompts], sampling, progress=True)
    answers = [
        Answer(kind, number % 2 == 0, [*ids, *completion.ids], len(ids))
        for number, ((kind, ids), completion) in enumerate(zip(prompts, completions))
    ]
    if kept:
        Path(kept).write_text(json.dumps([asdict(each) for each in answers]))
    return answers


def parted(answers: Sequence[Answer]) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Parts the answers into those to learn from, and those that are held out, by kind."""
    held_out: dict[str, list[Answer]] = {kind: [] for kind in PROMPTS}
    taught = []
    for each in answers:
        if each.greedy and len(held_out[each.kind]) < HELD_OUT:
            held_out[each.kind].append(each)
        else:
            taught.append(each)
    return taught, held_out


def frequent_ids(answers: Sequence[Answer], vocab: int, count: int) -> np.ndarray:
    """Returns `count` ids, ascending: those that are most frequent in the answers, filled up by low
    ones."""
    counts = np.zeros(vocab)
    for each in answers:
        np.add.at(counts, each.ids[each.begins :], 1)
    return np.sort(np.argsort(-counts, stable=True)[:count])


def prompts_by_kind() -> list[tuple[str, str]]:
    """Returns kinds and prompts, in an order in which kinds and lengths are mixed."""
    chance = random.Random(0)
    sources = python_sources()
    chance.shuffle(sources)
    edited = sources[: PROMPTS["edits"]]
    pieces = [chance.choice(list(passages(source, "\n\n\n", chance))) for source in edited]
    texts = [piece for text in topics.values() for piece in passages(text, "\n\n", chance)]
    texts += [ast.get_docstring(ast.parse(source)) or "" for source in sources[len(edited) :]]
    texts = [text[: CHARACTERS[1]] for text in texts if len(text) > CHARACTERS[0]]
    kinds = {
        "chat": [
            template.format(" ".join(thing.split()))
            for things, templates in QUESTIONS.items()
            for template, thing in itertools.product(templates, things.split(","))
        ],
        "edits": [
            f"{request} Answer with the whole code.\n```python\n{piece}\n```"
            for request, piece in zip(itertools.cycle(EDITS), pieces)
        ],
        "summaries": [
            f"{request}\n\n{text}" for request, text in zip(itertools.cycle(READINGS), texts)
        ],
    }
    prompts = [
        (kind, prompt)
        for kind, count in PROMPTS.items()
        for prompt in chance.sample(kinds[kind], count)
    ]
    chance.shuffle(prompts)
    return prompts


def python_sources() -> list[str]:
    """Reads the modules of the standard library that are long enough."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not UNUSED & set(file.relative_to(folder).parts)
    ]
    sources = [file.read_text(errors="ignore") for file in files]
    return [source for source in sources if len(source) > CHARACTERS[1]]


def passages(text: str, between: str, chance: random.Random) -> Iterator[str]:
    """Cuts a text into pieces of random lengths, each of which begins where a part of it does."""
    while len(text) > CHARACTERS[0]:
        size = chance.randint(*CHARACTERS)
        yield text[:size].strip()
        _, _, text = text[size:].partition(between)
