"""What `agentrl template check` found, as text, as a coloured view of tokens, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.check.sample import Piece, SampleEpisode
from agentrl.render import Renderer

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"prompt": "dim", "trained": "green", "between": "yellow"}
SHOWN = 700  # characters of one stretch; the middle of a longer one is left out
_RUN = 48  # tokens decoded together to find the text of each


@dataclass(frozen=True, slots=True)
class Token:
    """One token as a person reads it."""

    text: str
    control: bool


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a template does; without renderer and episode where it cannot be used."""

    model: str
    tokenizer: Any
    renderer: Renderer | None
    episode: SampleEpisode | None
    refusal: str | None

    @property
    def usable(self) -> bool:
        return self.refusal is None and not (self.episode and self.episode.faults)

    def facts(self) -> list[tuple[str, str]]:
        """Pairs of a name and what was found."""
        if self.renderer is None or self.episode is None:
            return []
        verdict, like = self.renderer.verdict, self.renderer.describe()
        stops = " ".join(self.renderer.decode([i]) for i in self.renderer.stop_ids)
        forks = [
            f"{count} of {turns} {'turn' if turns == 1 else 'turns'} after {what}"
            for what, (count, turns) in (
                ("tool results", self.episode.forks("tool")),
                ("a user's message", self.episode.forks("user")),
            )
            if turns
        ]
        return [
            ("template", f"{verdict.template}: {verdict.why}"),
            ("calls", like["calls"] or "none"),
            ("reasoning", (like["thinking"] or "none").strip()),
            ("stop tokens", stops),
            ("forks", "; ".join(forks)),
            *[("note", sentence) for sentence in self.episode.left_out],
        ]

    def verdict(self) -> str:
        """One sentence: may this be trained with, and what to do."""
        if self.refusal is not None:
            fix = "" if "Pass " in self.refusal else " Pass another template: --chat-template FILE."
            return f"{self.model} cannot be used like this: {self.refusal}{fix}"
        assert self.renderer is not None and self.episode is not None
        if self.episode.faults:
            return (
                f"{self.model} cannot be used like this: {self.episode.faults[0]}. Pass another template, one that "
                "writes calls in a known form: --chat-template FILE."
            )
        tool, user = self.episode.forks("tool")[0], self.episode.forks("user")[0]
        if not tool and not user and self.renderer.verdict.preserving:
            return f"{self.model} can be trained: every turn continues the tokens held so far."
        if not tool and not user:
            why = self.renderer.verdict.why
            return f"{self.model} can be trained: no turn of the sample forks, but others may, because {why}."
        when = "after tool results" if tool else "only when a user speaks again"
        drift = next(turn.drift for turn in self.episode.turns if turn.drift is not None)
        return (
            f"{self.model} can be trained, but turns fork {when}, each at the cost of one more sequence: {drift.why}."
        )

    # --- tokens ------------------------------------------------------------------------
    def tokens(self, piece: Piece) -> list[Token]:
        """The texts of the piece's tokens; the bytes of a character that several tokens share are with the last."""
        assert self.renderer is not None
        control = _control_ids(self.tokenizer)
        made: list[Token] = []
        run: list[int] = []
        shown = ""
        for i in piece.ids:
            if i in control:
                made.append(Token(self.renderer.decode([i]), True))
                run, shown = [], ""
                continue
            run.append(i)
            text = self.renderer.decode(run)
            whole = not text.endswith("\ufffd")
            made.append(Token(text[len(shown) :] if whole else "", False))
            if whole:
                shown = text
                if len(run) > _RUN:  # one token stays: some decoders treat the first one otherwise
                    run = run[-1:]
                    shown = self.renderer.decode(run)
        return made

    def text(self, *, full: bool = False) -> str:
        """Everything as plain text: control tokens between « and », a line break as ⏎."""
        lines = [f"{name:<12} {what}" for name, what in self.facts()]
        for piece in self._pieces():
            lines += ["", self._heading(piece)]
            body = "".join(f"«{t.text}»" if t.control else _visible(t.text) for t in _cut(self.tokens(piece), full))
            lines += [f"    {line}".rstrip() for line in body.removesuffix("\n").split("\n")]
        return "\n".join([*lines, *([""] if lines else []), self.verdict()])

    def rich(self, *, full: bool = False) -> RenderableType:
        """The same with colours: control tokens inverted, every other token on a shade of grey."""
        from rich.text import Text

        out = Text()
        for name, what in self.facts():
            out.append(f"{name:<12} ", "bold").append(f"{what}\n")
        for piece in self._pieces():
            style = STYLES[piece.kind]
            out.append(f"\n{self._heading(piece)}\n", "bold " + style)
            for n, token in enumerate(_cut(self.tokens(piece), full)):
                shade = " reverse" if token.control else " on grey15" if n % 2 else ""
                out.append(_visible(token.text), style + shade)
            out.append("" if out.plain.endswith("\n") else "\n")
        if self.episode is not None:
            out.append("\n")
        return out.append(self.verdict(), "bold green" if self.usable else "bold red")

    def _pieces(self) -> Iterator[Piece]:
        yield from self.episode.pieces() if self.episode else ()

    def _heading(self, piece: Piece) -> str:
        count = f"{len(piece.ids)} token{'' if len(piece.ids) == 1 else 's'}"
        what = {
            "prompt": "prompt" if piece.turn == 0 else "a new sequence: the whole prompt again",
            "trained": "sampled, trained",
            "between": "added: held, not trained",
        }
        return f"turn {piece.turn}, {what[piece.kind]}, {count}"

    def as_json(self) -> dict[str, Any]:
        """Everything for programs."""
        found: dict[str, Any] = {"model": self.model, "usable": self.usable, "verdict": self.verdict()}
        if self.renderer is None or self.episode is None:
            return found
        verdict = self.renderer.verdict
        forks = {after: self.episode.forks(role) for after, role in (("after_tools", "tool"), ("after_user", "user"))}
        return found | {
            "template": verdict.template,
            "preserving": verdict.preserving,
            "why": verdict.why,
            **self.renderer.describe(),
            "stop_ids": list(self.renderer.stop_ids),
            "stop_tokens": [self.renderer.decode([i]) for i in self.renderer.stop_ids],
            "forks": {name: {"forks": count, "turns": turns} for name, (count, turns) in forks.items()},
            "drifts": [{"turn": n, "drift": t.drift} for n, t in enumerate(self.episode.turns) if t.drift is not None],
            "notes": self.episode.left_out,
            "episode": [
                {"turn": p.turn, "kind": p.kind, "ids": p.ids, "text": self.renderer.decode(p.ids)}
                for p in self._pieces()
            ],
        }


def _control_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of added tokens that are no words and no runs of spaces."""
    added = tokenizer.get_added_vocab().items()
    return frozenset(i for text, i in added if not all(c.isalnum() or c.isspace() for c in text))


def _cut(tokens: list[Token], full: bool) -> list[Token]:
    """The tokens, with the middle of a long stretch left out."""
    if full or sum(len(t.text) for t in tokens) <= SHOWN:
        return tokens
    first = _many(tokens, SHOWN // 2)
    last = len(tokens) - _many(tokens[first:][::-1], SHOWN // 2)
    if last <= first:
        return tokens
    return [*tokens[:first], Token(f" ... ({last - first} more tokens) ... ", False), *tokens[last:]]


def _many(tokens: list[Token], room: int) -> int:
    """How many tokens from the start have at most so many characters."""
    for n, token in enumerate(tokens):
        room -= len(token.text)
        if room < 0:
            return n
    return len(tokens)


def _visible(text: str) -> str:
    """Line breaks as a sign and a break; other control characters written out.

    >>> _visible("a" + chr(10) + chr(27))
    'a⏎\\n\\\\x1b'
    """
    return "".join("⏎\n" if c == "\n" else c if c.isprintable() or c == " " else repr(c)[1:-1] for c in text)
