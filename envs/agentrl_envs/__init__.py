"""Ready environments, one small package each, registered when this package is imported."""

from __future__ import annotations

from agentrl.registry import register


def register_all() -> None:
    """Every environment of this package can be built by its id. They are imported when they are built."""
    register("agentrl/Hunt-v0", "agentrl_envs.hunt:Hunt")
    register("agentrl/Courier-v0", "agentrl_envs.courier:Courier")
    register("agentrl/Recycle-v0", "agentrl_envs.recycle:Recycle")
    register("agentrl/GridWorld-v0", "agentrl_envs.grid_world:GridWorld")
    register("agentrl/Calculator-v0", "agentrl_envs.calculator:Calculator")
    register("agentrl/GuessNumber-v0", "agentrl_envs.guess_number:GuessNumber")
    register("agentrl/Wordle-v0", "agentrl_envs.wordle:Wordle")
    register("agentrl/Sudoku-v0", "agentrl_envs.sudoku:Sudoku")
    register("agentrl/Game2048-v0", "agentrl_envs.game_2048:Game2048")
    register("agentrl/TicTacToe-v0", "agentrl_envs.tictactoe:TicTacToe")
    register("agentrl/Connect4-v0", "agentrl_envs.connect4:Connect4")
    register("agentrl/Coding-v0", "agentrl_envs.coding:Coding")
    register("agentrl/Shell-v0", "agentrl_envs.shell:Shell")
    register("agentrl/Data-v0", "agentrl_envs.data:Data")
    register("agentrl/Retrieval-v0", "agentrl_envs.retrieval:Retrieval")


register_all()
