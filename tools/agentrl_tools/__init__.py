"""Ready tools: for `tools=[...]` of a trainer, and for the methods of your own environments."""

from __future__ import annotations

from agentrl_tools.calculator import calculator
from agentrl_tools.clock import Clock, clock
from agentrl_tools.sandboxed import SandboxTools
from agentrl_tools.search import Search
from agentrl_tools.workspace import Workspace

__all__ = ["Clock", "SandboxTools", "Search", "Workspace", "calculator", "clock"]
