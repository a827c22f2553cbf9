"""How an opponent is beaten whose replies are known."""

from __future__ import annotations

from collections.abc import Callable

from agentrl_envs.connect4.board import Shape, best_columns

MOST_REPLIES = 4000  # of the opponent, looked at for one plan
MOST_MOVES = 9  # of our own, in one plan
DEPTH = 4  # of the search where no plan is found

Reply = Callable[[int, int], int]  # (the opponent's discs, ours) -> its column


def plan(shape: Shape, own: int, other: int, reply: Reply) -> list[int]:
    """Our columns up to the win against these replies, the shortest first; empty where none was found in the limits."""
    replies: dict[tuple[int, int], int] = {}

    def answered(mine: int, theirs: int) -> int | None:
        """The opponent's discs after its reply; None where it wins, or nothing is left to play, or the budget is."""
        key = (theirs, mine)
        if key not in replies:
            if len(replies) >= MOST_REPLIES or not shape.moves(mine | theirs):
                return None
            replies[key] = reply(theirs, mine)
        after = theirs | shape.drop(mine | theirs, replies[key])
        return None if shape.wins(after) else after

    def line(mine: int, theirs: int, moves: int) -> list[int] | None:
        options = [(column, mine | shape.drop(mine | theirs, column)) for column in shape.moves(mine | theirs)]
        for column, after in options:
            if shape.wins(after):
                return [column]
        if moves == 1:
            return None
        for column, after in options:
            then = answered(after, theirs)
            if then is not None and (rest := line(after, then, moves - 1)) is not None:
                return [column, *rest]
        return None

    for moves in range(1, MOST_MOVES + 1):
        found = line(own, other, moves)
        if found is not None:
            return found
        if len(replies) >= MOST_REPLIES:
            break
    return []


def careful(shape: Shape, own: int, other: int) -> int:
    """The column that a search of limited depth likes best, the middle first."""
    return best_columns(shape, own, other, DEPTH)[0]
