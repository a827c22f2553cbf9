"""How families of models write their turns. A format is chosen by reading back what a template wrote (`learn`)."""

from agentrl.render.formats.actions import COMMAND_R, COMMAND_R7B, MISTRAL
from agentrl.render.formats.atem import Atem
from agentrl.render.formats.bare_json import BareJson
from agentrl.render.formats.base import CallFormat, Schemas, Think, TurnFormat
from agentrl.render.formats.deepseek import DeepSeek
from agentrl.render.formats.gemma4 import Gemma4
from agentrl.render.formats.glm import Glm
from agentrl.render.formats.harmony import Harmony
from agentrl.render.formats.hermes import Hermes
from agentrl.render.formats.pythonic import Pythonic
from agentrl.render.formats.shipped_parser import ShippedParser
from agentrl.render.formats.turn import Tagged
from agentrl.render.formats.xml_parameters import XmlParameters

THINKS: tuple[Think, ...] = (
    Think("<think>", "</think>"),
    Think("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Think("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Think("[THINK]", "[/THINK]"),  # Magistral
)
CALLS: tuple[CallFormat, ...] = (
    Hermes(),
    XmlParameters(),
    Glm(),
    DeepSeek(),
    Gemma4(),
    Pythonic("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    COMMAND_R7B,
    COMMAND_R,
    MISTRAL,
    BareJson(),
    Pythonic("pythonic", "", ""),
)
"""Tagged ones first: the last two take any text of their form for a call."""
TURNS: tuple[TurnFormat, ...] = (Harmony(), Atem())
"""Formats in which a whole turn has a form of its own (channels)."""

__all__ = [
    "CALLS",
    "THINKS",
    "TURNS",
    "CallFormat",
    "Hermes",
    "Schemas",
    "ShippedParser",
    "Tagged",
    "Think",
    "TurnFormat",
]
