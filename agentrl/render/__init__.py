"""Messages to tokens and back: templates, bridging, parsing, drift."""

from agentrl.render.probe import Verdict
from agentrl.render.renderer import Renderer

__all__ = ["Renderer", "Verdict"]
