"""Places to run code that nobody has read: no network, no files or environment of the host, limits on everything."""

from agentrl.sandbox.grading import FunctionVerdict, Grade, Run, grade, run_function_tests
from agentrl.sandbox.open import open_sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.reaper import reap
from agentrl.sandbox.types import ExecResult, Sandbox, SandboxSpec

__all__ = [
    "ExecResult",
    "FunctionVerdict",
    "Grade",
    "Run",
    "Sandbox",
    "SandboxPool",
    "SandboxSpec",
    "grade",
    "open_sandbox",
    "reap",
    "run_function_tests",
]
