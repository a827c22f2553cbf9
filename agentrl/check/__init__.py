"""Does an environment keep its promises? Every finding names what to change."""

from __future__ import annotations

from agentrl.check.arguments import bad_arguments, random_arguments
from agentrl.check.policies import Gold, gold_of, read_turn
from agentrl.check.report import CheckReport, Finding, RewardSpread
from agentrl.check.run import check_environment, examine_environment
from agentrl.check.tokens import TokenCost, byte_level_tokenizer, token_cost

__all__ = [
    "CheckReport",
    "Finding",
    "Gold",
    "RewardSpread",
    "TokenCost",
    "bad_arguments",
    "byte_level_tokenizer",
    "check_environment",
    "examine_environment",
    "gold_of",
    "random_arguments",
    "read_turn",
    "token_cost",
]
