"""Sudoku, 2048, tic-tac-toe and connect four: rules by hand or by a second implementation, rewards and knobs."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from agentrl_envs.connect4 import Connect4
from agentrl_envs.connect4 import board as four
from agentrl_envs.connect4 import gold as four_gold
from agentrl_envs.game_2048 import Game2048
from agentrl_envs.game_2048 import board as tiles
from agentrl_envs.sudoku import Sudoku, grids
from agentrl_envs.tictactoe import TicTacToe
from agentrl_envs.tictactoe import board as three
from hypothesis import given, settings
from hypothesis import strategies as st
from test_envs_games import gold, step


# --- sudoku ----------------------------------------------------------------------------
def count_solutions(grid, size, most=2):
    """Plain backtracking from the first empty cell, over rows and boxes given by their coordinates."""
    height, width = {4: (2, 2), 6: (2, 3), 9: (3, 3)}[size]
    cells = [list(grid[r * size : (r + 1) * size]) for r in range(size)]

    def fits(r, c, digit):
        box = [
            (i, j) for i in range(size) for j in range(size) if (i // height, j // width) == (r // height, c // width)
        ]
        return (
            digit not in cells[r]
            and digit not in [cells[i][c] for i in range(size)]
            and digit not in [cells[i][j] for i, j in box]
        )

    def count():
        found = 0
        for r, c in itertools.product(range(size), repeat=2):
            if cells[r][c] == 0:
                for digit in range(1, size + 1):
                    if fits(r, c, digit):
                        cells[r][c] = digit
                        found += count()
                        cells[r][c] = 0
                        if found >= most:
                            return found
                return found
        return 1

    return count()


@pytest.mark.parametrize(("size", "empties"), [(4, 6), (4, 10), (6, 12), (6, 22), (9, 30)])
def test_sudoku_puzzles_have_one_solution_by_a_second_solver(size, empties):
    for seed in range(8):
        puzzle, solution = grids.make_puzzle(size, empties, random.Random(seed))
        assert puzzle.count(0) == empties
        assert all(given in (0, right) for given, right in zip(puzzle, solution, strict=True))
        assert count_solutions(puzzle, size) == 1
        assert grids.solve(puzzle, size, 2) == [solution]
        for cell in range(size * size):
            for _, others in grids.peers(size)[cell]:
                assert solution[cell] not in [solution[other] for other in others]


def test_the_most_empty_cells_are_reached_on_many_seeds():
    for size, empties in grids.MOST_EMPTY.items():
        for seed in range(15 if size == 9 else 100):
            assert grids.make_puzzle(size, empties, random.Random(seed))[0].count(0) == empties


def test_sudoku_solver_counts_two_solutions():
    # four cells at the corners of a rectangle may be swapped
    solution = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
    puzzle = list(solution)
    for cell in (0, 1, 8, 9):
        puzzle[cell] = 0
    assert len(grids.solve(tuple(puzzle), 4, 9)) == count_solutions(puzzle, 4, 9) == 2
    assert len(grids.solve((1, 2, *[0] * 14), 4, 9)) == 9 and count_solutions([0] * 16, 4, 500) == 288


def at(env, row, column):
    return env._cells[(row - 1) * env._size + column - 1]


def test_sudoku_moves_and_rewards_by_hand():
    env = Sudoku()
    env.reset(seed=1)
    env._puzzle = (1, 2, 3, 0, 3, 0, 1, 2, 2, 1, 0, 3, 4, 3, 2, 0)
    env._solution = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
    env._cells = list(env._puzzle)
    assert env.place(1, 1, 4) == "r1c1 is 1 in the puzzle and cannot be changed. 17 moves left."
    assert env.place(1, 4, 3) == "3 cannot be in r1c4: its row has 3 in r1c3. 16 moves left."
    assert env.place(1, 5, 3) == "Rows, columns and digits are 1 to 4 here. 15 moves left."
    assert env.place(4, 4, 2) == "2 cannot be in r4c4: its row has 2 in r4c3. 14 moves left."
    assert env.place(2, 2, 1) == "1 cannot be in r2c2: its row has 1 in r2c3. 13 moves left."
    assert env.erase(2, 2) == "r2c2 is empty already. 12 moves left."
    assert env.get_reward() == 0.0
    assert env.place(2, 2, 4).startswith("placed 4 in r2c2. 11 moves left.\n      c1 c2 c3 c4\nr1:    1  2  3  .\n")
    assert at(env, 2, 2) == 4
    assert env.get_reward() == pytest.approx(0.45 / 4)
    assert env.erase(2, 2).startswith("erased r2c2. 10 moves left.")
    assert env.get_reward() == 0.0
    for cell in ((1, 4, 4), (2, 2, 4), (3, 3, 4)):
        env.place(*cell)
    assert env.get_reward() == pytest.approx(0.45 * 3 / 4) and not env.done
    assert env.place(4, 4, 1).startswith("solved\n")
    assert (env.done, env.get_reward()) == (True, 1.0)


def test_sudoku_wrong_digits_cost_and_submit_ends():
    env = Sudoku(empties=10)
    for seed in range(50):  # a seed where a digit breaks no rule and is wrong all the same
        env.reset(seed=seed)
        cell = env._puzzle.index(0)
        row, column = divmod(cell, 4)
        for digit in {1, 2, 3, 4} - {env._solution[cell]}:
            env.place(row + 1, column + 1, digit)
        if env._cells[cell]:
            break
    assert env._cells[cell] not in (0, env._solution[cell])
    assert env.get_reward() == 0.0
    others = [other for other, given in enumerate(env._puzzle) if not given and other != cell]
    for other in others[:3]:
        env._cells[other] = env._solution[other]
    assert env.get_reward() == pytest.approx(0.45 * 2 / 10)  # three right, one wrong
    for other in others[:3]:
        env._cells[other] = 0
    assert step(env, env._gold()).startswith("erased")
    step(env, env._gold())
    assert env.get_reward() == pytest.approx(0.045)
    assert env.submit() == "1 of 10 cells are right"
    assert (env.done, env.get_reward()) == (True, pytest.approx(0.095))


def test_sudoku_knobs():
    env = Sudoku()
    for size, empties in ((4, 6), (6, 12), (9, 30)):
        assert env.reset(seed=1, size=size).count(" .") == empties
    assert env.reset(seed=1, size=9, empties=3).count(" .") == 3
    assert Sudoku(size=9, empties=40).reset(seed=1, size=4).count(" .") == 6  # 40 was meant for 9
    env.reset(seed=1, max_moves=2)
    assert (env.place(1, 1, 1), env.done) and not env.done
    env.erase(1, 1)
    assert env.done
    assert "Moves: 18." in env.reset(seed=1)


# --- 2048 ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "slid", "gained"),
    [((2, 2, 0, 0), (4, 0, 0, 0), 4), ((2, 0, 0, 2), (4, 0, 0, 0), 4), ((2, 2, 2, 0), (4, 2, 0, 0), 4),
     ((2, 2, 2, 2), (4, 4, 0, 0), 8), ((4, 2, 2, 0), (4, 4, 0, 0), 4), ((2, 2, 4, 0), (4, 4, 0, 0), 4),
     ((2, 2, 4, 4), (4, 8, 0, 0), 12), ((8, 4, 2, 2), (8, 4, 4, 0), 4), ((2, 4, 2, 4), (2, 4, 2, 4), 0),
     ((0, 0, 0, 2), (2, 0, 0, 0), 0), ((0, 0, 0, 0), (0, 0, 0, 0), 0), ((4, 4, 8, 16), (8, 8, 16, 0), 8)],
)  # fmt: skip
def test_2048_merges_by_hand(row, slid, gained):
    assert tiles.slide(row) == (slid, gained)


def second_slide(row):
    """Pass over the pairs; a merged tile is set aside before the next pair is looked at."""
    rest, out = [tile for tile in row if tile], []
    while rest:
        one = rest.pop(0)
        out.append(2 * rest.pop(0) if rest and rest[0] == one else one)
    return tuple(out + [0] * (len(row) - len(out)))


@given(st.lists(st.sampled_from([0, 2, 4, 8]), min_size=3, max_size=5).map(tuple))
def test_2048_merges_agree_with_a_second_implementation(row):
    slid, gained = tiles.slide(row)
    assert slid == second_slide(row)
    assert sum(slid) == sum(row)
    assert (gained == 0) == (sum(map(bool, slid)) == sum(map(bool, row)))


@given(st.lists(st.sampled_from([0, 2, 4]), min_size=9, max_size=9))
def test_2048_directions_are_turns_of_each_other(cells):
    board = tuple(tuple(cells[i : i + 3]) for i in (0, 3, 6))
    turned = tuple(zip(*board[::-1], strict=True))  # a quarter clockwise: left becomes up
    for direction, then in (("left", "up"), ("up", "right"), ("right", "down"), ("down", "left")):
        moved, gained = tiles.move(board, direction)
        assert tiles.move(turned, then) == (tuple(zip(*moved[::-1], strict=True)), gained)


def test_2048_plays_and_scores_by_hand():
    env = Game2048(target=32)
    env.reset(seed=0)
    env._board = ((2, 2, 0), (0, 0, 0), (0, 0, 0))
    assert env.get_reward() == 0.0
    text = env.move("left")
    assert text.startswith("left, 4 merged, 31 moves left\n")
    assert env._board[0][0] == 4 and sum(map(sum, env._board)) in (6, 8)
    env._board = ((4, 0, 0), (2, 0, 0), (0, 0, 0))
    assert env.move("left").startswith("Nothing can slide left; down or right can. 30 moves left.\n")
    assert env._board == ((4, 0, 0), (2, 0, 0), (0, 0, 0))  # and no tile came
    for highest, reward in ((2, 0.0), (4, 0.0), (8, 1 / 3), (16, 2 / 3), (32, 1.0), (64, 1.0)):
        env._board = ((highest, 0, 0), (0, 0, 0), (0, 0, 0))
        assert env.get_reward() == pytest.approx(reward)
    env._board = ((16, 16, 0), (0, 0, 0), (0, 0, 0))
    assert env.move("left").startswith("left, 32 merged: the tile 32 is made\n32")
    assert (env.done, env.get_reward()) == (True, 1.0)
    env.reset(seed=0)
    env._board = ((2, 4, 8), (4, 8, 2), (0, 2, 4))
    while not env.done:
        env.move("left")
        env._board = env._board if env.done else ((2, 4, 8), (4, 8, 2), (0, 2, 16))
    assert tiles.legal(env._board) == [] or env._moves == 32


def test_2048_is_over_when_nothing_can_slide():
    env = Game2048()
    for seed in range(40):
        env.reset(seed=seed)
        env._board = ((8, 16, 8), (16, 8, 16), (0, 8, 4))
        text = env.move("left")  # 8 4 and a new tile: 2 is stuck, 4 is not
        if env._board[2][2] == 2:
            assert text.startswith("left: no move is left, the game is over\n")
            assert env.done and env.get_reward() == pytest.approx(2 / 3)
            return
    raise AssertionError("no 2 came")


def test_2048_new_tiles_are_fair():
    rng, drawn = random.Random(0), Counter()
    for _ in range(3000):
        board = tiles.add_tile(((0, 2), (2, 0)), rng)
        cell = next((r, c) for r, c in ((0, 0), (1, 1)) if board[r][c])
        drawn[cell, board[cell[0]][cell[1]]] += 1
    assert {tile for _, tile in drawn} == {2, 4}
    assert 0.07 < sum(n for (_, tile), n in drawn.items() if tile == 4) / 3000 < 0.13
    assert 0.46 < sum(n for (cell, _), n in drawn.items() if cell == (0, 0)) / 3000 < 0.54


def test_2048_knobs():
    env = Game2048()
    assert [env.reset(seed=1, size=size).count("\n") for size in (3, 4, 5)] == [3, 4, 5]
    assert "a tile of 8 in at most 8 moves" in env.reset(seed=1, target=8)
    assert gold(env, 1, target=8)[2] == 1.0
    env.reset(seed=1, max_moves=1)
    env.move("left")
    assert env.done


# --- tic-tac-toe -----------------------------------------------------------------------
def test_tictactoe_is_solved_as_everybody_knows():
    assert three.value(three.EMPTY, "X") == three.value(three.EMPTY, "O") == 0
    assert three.best_cells("X........", "O") == [4]  # only the middle holds against a corner
    assert set(three.best_cells("....X....", "O")) == {0, 2, 6, 8}  # only corners against the middle
    assert set(three.best_cells("X...O...X", "O")) == {1, 3, 5, 7}  # a corner would lose here
    assert three.best_cells("XX.OO....", "X") == [2]  # win, not block
    assert three.best_cells("XX.O.....", "O") == [2]  # block
    assert three.value("XX.OO....", "O") == -5  # O wins now, with four cells left
    assert three.value("XX.O.....", "O") == 3  # it is lost, and a block all the same is the longest way
    assert len({three.value(three.put(three.EMPTY, cell, "X"), "O") for cell in range(9)}) == 1


def test_tictactoe_winners_by_hand():
    wins = ["XXX......", "...XXX...", "......XXX", "X..X..X..", ".X..X..X.", "..X..X..X", "X...X...X", "..X.X.X.."]
    boards = ["".join(cells) for cells in itertools.product("X.", repeat=9) if cells.count("X") == 3]
    assert sorted(board for board in boards if three.winner(board)) == sorted(wins)


def test_tictactoe_perfect_opponent_never_loses():
    env, results = TicTacToe(mistakes=0), Counter()
    for seed in range(150):
        rng = random.Random(seed)
        env.reset(seed=seed)
        while not env.done:
            env.play(rng.choice(three.free(env._board)) + 1)
        results[three.winner(env._board)] += 1
    assert results["X"] == 0 and results["O"] > 50 and results[None] > 0


@pytest.mark.parametrize("mistakes", [0.0, 0.05, 0.3, 1.0])
def test_tictactoe_gold_never_loses_and_gets_the_top(mistakes):
    env = TicTacToe(mistakes=mistakes)
    for seed in range(25):
        first, answers, reward = gold(env, seed)
        assert reward == 1.0 and not answers[-1].count("You lose")
        beatable = "cannot be beaten" not in first
        assert beatable == (answers[-1].startswith("You win") or "You win" in answers[-1])
        assert mistakes > 0 or not beatable


def test_tictactoe_games_by_hand():
    env = TicTacToe(begins="you")
    env.reset(seed=0)
    assert env._show() == "1 2 3\n4 5 6\n7 8 9"
    env._board = "XX.OO...."
    assert env.get_reward() == pytest.approx(0.2 * 4 / 9)
    assert env.play(1) == "Cell 1 is taken. Free cells: 3, 6, 7, 8, 9."
    assert env.play(3) == "You win.\nX X X\nO O 6\n7 8 9"
    assert (env.done, env.get_reward()) == (True, 1.0)
    env.reset(seed=0, mistakes=0)
    env._board = "X..OO...X"
    assert env.play(2).startswith("The opponent takes 6. You lose.\n")
    assert (env.done, env.get_reward()) == (True, pytest.approx(0.2 * 6 / 9))
    env.reset(seed=0, mistakes=0.3)
    env._board, env._draw = "XOXXOO.XO", 0.5
    assert env.play(7) == "You win.\nX O X\nX O O\nX X O"
    env.reset(seed=0, mistakes=0.3)
    env._board, env._draw = "XOXXOOO.X", 0.5
    assert env.play(8).startswith("The game is a draw.")
    assert (env.done, env.get_reward()) == (True, 0.5)


def test_tictactoe_refuses_and_in_the_end_forfeits():
    env = TicTacToe(begins="you")
    env.reset(seed=0)
    env.play(5)
    for _ in range(4):
        env.play(5)
    assert not env.done
    assert env.play(5).endswith("That was the last warning: you lose.")
    assert env.done and env.get_reward() < 0.2


def test_tictactoe_knobs():
    env = TicTacToe()
    assert all("You begin" in env.reset(seed=seed, begins="you") for seed in range(8))
    assert all("The opponent began" in env.reset(seed=seed, begins="opponent") for seed in range(8))
    assert len({"You begin" in env.reset(seed=seed) for seed in range(8)}) == 2
    wins = []
    for mistakes in (0.0, 0.5, 1.0):
        won = 0
        for seed in range(80):
            env.reset(seed=seed, mistakes=mistakes)
            while not env.done:
                env.play(three.best_cells(env._board, "X")[0] + 1)
            won += three.winner(env._board) == "X"
        wins.append(won)
    assert wins[0] == 0 < wins[1] < wins[2]


# --- connect four ----------------------------------------------------------------------
def discs(shape, rows):
    """The bits of X and of O in a picture, top row first."""
    found = {"X": 0, "O": 0, ".": 0}
    for r, line in enumerate(reversed(rows.split())):
        for c, mark in enumerate(line):
            found[mark] |= 1 << (c * (shape.rows + 1) + r)
    return found["X"], found["O"]


def test_connect4_lines_by_hand():
    shape = four.Shape(4, 5)
    for rows in ("..... ..... ..... .XXXX", ".X... .X... .X... .X...", "X.... .X... ..X.. ...X.",
                 "...X. ..X.. .X... X....", "....X ...X. ..X.. .X..."):  # fmt: skip
        assert shape.wins(discs(shape, rows)[0]), rows
    for rows in ("..... ..... ..... XXX.X", ".X... .X... .X... .....", "XX... X.... X.... .X..."):
        assert not shape.wins(discs(shape, rows)[0]), rows
    tall = four.Shape(6, 7)  # the end of one column and the start of the next are no line
    assert not tall.wins(0b1100000 >> 1 | 0b11 << 7 | 0)
    assert not tall.wins(discs(tall, "X...... X...... .X..... .X..... .......  .......")[0])


@given(st.integers(4, 6), st.integers(4, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_connect4_lines_agree_with_a_second_implementation(rows, columns, data):
    cells = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    grid = [cells[r * columns : (r + 1) * columns] for r in range(rows)]

    def line(r, c, dr, dc):
        ends = (r + 3 * dr, c + 3 * dc)
        return 0 <= ends[0] < rows and 0 <= ends[1] < columns and all(grid[r + i * dr][c + i * dc] for i in range(4))

    expected = any(
        line(r, c, *way) for r in range(rows) for c in range(columns) for way in ((0, 1), (1, 0), (1, 1), (1, -1))
    )
    bits = sum(1 << (c * (rows + 1) + r) for r in range(rows) for c in range(columns) if grid[r][c])
    assert four.Shape(rows, columns).wins(bits) == expected


def minimax(shape, own, other, depth):
    """As `search`, without cut-offs."""
    moves = shape.moves(own | other)
    if depth == 0 or not moves:
        return 0
    values = []
    for column in moves:
        after = own | shape.drop(own | other, column)
        values.append(four.WIN + depth if shape.wins(after) else -minimax(shape, other, after, depth - 1))
    return max(values)


def test_connect4_search_agrees_with_plain_minimax_and_knows_the_basics():
    shape = four.Shape(4, 5)
    for seed in range(25):
        rng, own, other = random.Random(seed), 0, 0
        for _ in range(rng.randint(0, 12)):
            column = rng.choice(shape.moves(own | other))
            own, other = other, own | shape.drop(own | other, column)
            if shape.wins(other):
                break
        else:
            assert four.search(shape, own, other, 4) == minimax(shape, own, other, 4)
    own, other = discs(shape, "..... ..... OOO.. XXX..")
    assert four.best_columns(shape, own, other, 2) == [3]  # win
    assert four.best_columns(shape, other, own, 2) == [3]  # block
    assert sorted(four.best_columns(shape, own, other, 0)) == [0, 1, 2, 3, 4]


def test_connect4_games_by_hand():
    env = Connect4(rows=4, columns=5, begins="you")
    env.reset(seed=0)
    assert env._show() == "1 2 3 4 5\n. . . . .\n. . . . .\n. . . . .\n. . . . ."
    assert env.get_reward() == 0.0
    env._own, env._other = discs(env._shape, "..... ..... OOO.. XXX..")
    assert env.get_reward() == pytest.approx(0.2 * 6 / 20)
    assert env.drop(4) == "You win.\n1 2 3 4 5\n. . . . .\n. . . . .\nO O O . .\nX X X X ."
    assert (env.done, env.get_reward()) == (True, 1.0)
    env.reset(seed=0, mistakes=0)
    env._own, env._other = discs(env._shape, "..... X.... X.... OOO.X")
    assert env.drop(5).startswith("The opponent plays 4. You lose.\n")
    assert (env.done, env.get_reward()) == (True, pytest.approx(0.2 * 8 / 20))
    env.reset(seed=0, mistakes=0)
    env._own, env._other = discs(env._shape, ".OXOX XOXOX XOXOX OXOXO")
    env.drop(1)
    assert (env.done, env.get_reward()) == (True, 0.5)
    env.reset(seed=0)
    assert env.drop(8) == "Column 8 is not on this board. Free columns: 1, 2, 3, 4, 5."
    env._own, env._other = discs(env._shape, "X.... O.... X.... O....")
    assert env.drop(1) == "Column 1 is full. Free columns: 2, 3, 4, 5."
    for _ in range(3):
        text = env.drop(1)
    assert text.endswith("you lose.") and env.done


def test_connect4_plans_are_won_against_the_opponent_they_are_for():
    shape = four.Shape(4, 4)

    def full(theirs, ours):  # always the first free column from the left
        return min(shape.moves(theirs | ours))

    plan = four_gold.plan(shape, 0, 0, full)
    own = other = 0
    for column in plan:
        own |= shape.drop(own | other, column)
        if not shape.wins(own):
            other |= shape.drop(own | other, full(other, own))
    assert shape.wins(own) and not shape.wins(other)
    assert four_gold.plan(shape, *discs(shape, "XOXO XOXO OXOX OXOX"), full) == []


def test_connect4_gold_goes_on_after_another_move_was_made():
    env = Connect4()
    env.reset(seed=3)
    env._gold()
    other = next(column for column in range(7) if column != env._plan[0])
    env.drop(other + 1)
    while not env.done:
        step(env, env._gold())
    assert env.get_reward() == 1.0


def test_connect4_knobs():
    env = Connect4()
    assert env.reset(seed=1, rows=4).count("\n") == 5
    assert "\n1 2 3 4 5 6 7 8\n" in env.reset(seed=1, columns=8)
    assert "You begin" in env.reset(seed=1, begins="you") and "opponent began" in env.reset(seed=1, begins="opponent")

    def won(**knobs):
        total = 0
        for seed in range(40):
            rng = random.Random(seed)
            env.reset(seed=seed, **knobs)
            while not env.done:
                env.drop(rng.choice(env._shape.moves(env._own | env._other)) + 1)
            total += env.get_reward() == 1.0
        return total

    assert won(depth=0) > won(depth=2, mistakes=0.0) + 5
    assert won(depth=2, mistakes=1.0) > won(depth=2, mistakes=0.0) + 5
