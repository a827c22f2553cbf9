"""The backend that needs no container engine: Linux namespaces through bubblewrap."""

from agentrl.sandbox.bubblewrap.box import BubblewrapSandbox
from agentrl.sandbox.bubblewrap.machine import missing, reap

__all__ = ["BubblewrapSandbox", "missing", "reap"]
