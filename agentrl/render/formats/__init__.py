"""How families of models write their turns. A format is chosen by reading back what a template wrote (`probe`)."""

from agentrl.render.formats.base import CallFormat, Schemas, Think, TurnFormat
from agentrl.render.formats.hermes import Hermes
from agentrl.render.formats.turn import Tagged

THINKS: tuple[Think, ...] = (Think("<think>", "</think>"),)
CALLS: tuple[CallFormat, ...] = (Hermes(),)
TURNS: tuple[TurnFormat, ...] = ()
"""Formats in which a whole turn has a form of its own (channels)."""

__all__ = ["CALLS", "THINKS", "TURNS", "CallFormat", "Hermes", "Schemas", "Tagged", "Think", "TurnFormat"]
