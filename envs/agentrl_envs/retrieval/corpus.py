"""A made-up world of people, towns and companies: facts, questions over several of them, and documents that tell them.

Nothing in it can be known from elsewhere: names are drawn syllable by syllable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
CODAS = ("", "l", "m", "n", "r", "s", "th", "x", "lm", "nd", "rk", "st")
TRADES = ("baker", "beekeeper", "bookbinder", "carpenter", "clockmaker", "glassblower", "locksmith", "miner", "painter",
          "potter", "sailor", "tailor", "violinist", "weaver")  # fmt: skip
DISHES = ("almond soup", "barley cake", "black dumplings", "fig bread", "honey tart", "leek pie", "pickled plums",
          "roast chestnuts", "saffron rice", "smoked eel", "walnut cheese", "wild garlic stew")  # fmt: skip
PRODUCTS = ("barometers", "bells", "compasses", "ladders", "lanterns", "microscopes", "pianos", "ropes", "saddles",
            "sails", "scales", "stoves", "umbrellas", "wallpaper")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact about one kind of entity: how it is told, and how a question speaks of it."""

    name: str
    of: str  # kind of entity that it is about
    gives: str  # kind of entity that it leads to, or "" where it is a value
    told: str  # a sentence with {a} and {b}
    asked: str  # a phrase with {}, or a whole question where `gives` is ""


RELATIONS = (
    Relation("birthplace", "person", "town", "{a} was born in {b}.", "the town where {} was born"),
    Relation("employer", "person", "company", "{a} works for {b}.", "the company that {} works for"),
    Relation("teacher", "person", "person", "{b} was the teacher of {a}.", "the teacher of {}"),
    Relation("trade", "person", "", "By trade {a} is a {b}.", "What is the trade of {}?"),
    Relation("born", "person", "", "The year of birth of {a} is {b}.", "In which year was {} born?"),
    Relation("mayor", "town", "person", "The mayor of {a} is {b}.", "the mayor of {}"),
    Relation("twin", "town", "town", "The twin town of {a} is {b}.", "the twin town of {}"),
    Relation("river", "town", "", "The river {b} flows through {a}.", "Which river flows through {}?"),
    Relation("dish", "town", "", "{a} is known for its {b}.", "Which dish is {} known for?"),
    Relation("founder", "company", "person", "{a} was founded by {b}.", "the founder of {}"),
    Relation("seat", "company", "town", "The seat of {a} is in {b}.", "the town where {} has its seat"),
    Relation("rival", "company", "company", "The main rival of {a} is {b}.", "the main rival of {}"),
    Relation("product", "company", "", "{a} makes {b}.", "What does {} make?"),
    Relation("opened", "company", "", "{a} opened its doors in {b}.", "In which year did {} open its doors?"),
)
ASIDES = {
    "person": ("{a} once spent a summer in {town}.", "{a} collects {product} in spare time.",
               "{a} wrote a letter to {person} in {year}.", "{a} dislikes {dish}."),
    "town": ("A storm hit {a} in {year}.", "{person} gave a talk in {a}.", "A road leads from {a} to {town}.",
             "The market of {a} sells {product}."),
    "company": ("{a} lent money to {company} in {year}.", "{person} visited {a}.",
                "{a} once had a shop in {town}.", "The canteen of {a} serves {dish}."),
}  # fmt: skip
Fact = tuple[str, str]  # (entity, name of the relation)


@dataclass(frozen=True, slots=True)
class Document:
    """What the corpus says about one entity."""

    title: str
    kind: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """Documents, and the facts that they tell: (entity, relation) -> entity or value."""

    documents: tuple[Document, ...]
    facts: dict[Fact, str]
    kinds: dict[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and the titles of the documents that must be read for it, in order."""

    text: str
    answer: str
    way: tuple[str, ...]


@lru_cache(maxsize=64)  # the rollouts of a group play in the same world
def make_world(seed: int, documents: int, asides: int) -> World:
    """The world of this seed; half of its documents are about people, the rest about towns and companies."""
    rng = random.Random(seed)
    kinds = _entities(rng, documents)
    by_kind = {kind: [e for e, k in kinds.items() if k == kind] for kind in ("person", "town", "company")}
    names = _names(rng, set(kinds))
    facts: dict[Fact, str] = {}
    for entity, kind in kinds.items():
        for relation in RELATIONS:
            if relation.of == kind:
                facts[entity, relation.name] = _object(rng, relation, entity, by_kind, names)
    order = list(kinds)
    rng.shuffle(order)
    return World(tuple(_document(rng, e, kinds[e], facts, by_kind, asides) for e in order), facts, kinds)


def make_question(world: World, hops: int, rng: random.Random) -> Question:
    """A question whose answer stands `hops` documents from the entity that it names; no document comes twice."""
    while True:
        entity = rng.choice(world.documents).title
        way, phrase = [entity], entity
        for _ in range(hops - 1):
            options = [r for r in RELATIONS if r.of == world.kinds[way[-1]] and r.gives]
            relation = rng.choice(options)
            way.append(world.facts[way[-1], relation.name])
            phrase = relation.asked.format(phrase)
        if len(set(way)) == hops:
            last = rng.choice([r for r in RELATIONS if r.of == world.kinds[way[-1]] and not r.gives])
            return Question(last.asked.format(phrase), world.facts[way[-1], last.name], tuple(way))


def _syllables(rng: random.Random, count: int) -> str:
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)]
    return ("".join(parts) + rng.choice(CODAS)).capitalize()


def _names(rng: random.Random, taken: set[str]) -> Iterator[str]:
    """Names that nothing else in the world has."""
    while True:
        name = _syllables(rng, 2)
        if name not in taken:
            taken.add(name)
            yield name


def _entities(rng: random.Random, count: int) -> dict[str, str]:
    """Entities and their kinds. Family names are shared, so that a name alone finds several documents."""
    fresh = _names(rng, set())
    kinds: dict[str, str] = {}
    towns, companies = count // 4, count // 4
    families = [next(fresh) for _ in range(max(3, count // 8))]
    for _ in range(towns):
        kinds[next(fresh)] = "town"
    for _ in range(companies):
        kinds[f"{rng.choice(families)} {rng.choice(('Brothers', 'Works', 'Company'))} {next(fresh)}"] = "company"
    for _ in range(count - towns - companies):
        kinds[f"{next(fresh)} {rng.choice(families)}"] = "person"
    return kinds


def _object(
    rng: random.Random, relation: Relation, entity: str, by_kind: dict[str, list[str]], names: Iterator[str]
) -> str:
    if relation.gives:
        return rng.choice([other for other in by_kind[relation.gives] if other != entity])
    values = {"trade": TRADES, "dish": DISHES, "product": PRODUCTS}.get(relation.name)
    if values is not None:
        return rng.choice(values)
    return next(names) if relation.name == "river" else str(rng.randint(1700, 1990))


def _document(
    rng: random.Random, entity: str, kind: str, facts: dict[Fact, str], by_kind: dict[str, list[str]], asides: int
) -> Document:
    told = [r.told.format(a=entity, b=facts[entity, r.name]) for r in RELATIONS if r.of == kind]
    for aside in rng.sample(ASIDES[kind], asides):
        fill = {k: rng.choice([e for e in found if e != entity]) for k, found in by_kind.items()}
        fill |= {"year": str(rng.randint(1700, 1990)), "dish": rng.choice(DISHES), "product": rng.choice(PRODUCTS)}
        told.append(aside.format(a=entity, **fill))
    rng.shuffle(told)
    return Document(entity, kind, (f"{entity} is a {kind}.", *told))
