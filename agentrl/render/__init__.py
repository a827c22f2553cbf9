"""Messages to tokens and back: templates, bridging, parsing, drift."""

from agentrl.render.choose import Verdict
from agentrl.render.renderer import Renderer

__all__ = ["Renderer", "Verdict"]
