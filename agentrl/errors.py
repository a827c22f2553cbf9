"""The exception tree. Messages are one or two sentences that name the thing and the fix."""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of every error that agentrl raises on purpose."""


class ConfigurationError(AgentRLError, ValueError):
    """An argument, a config field or a dataset that cannot work; raised at construction where it can be known."""


class ToolDefinitionError(ConfigurationError, TypeError):
    """A tool without types or documentation. Names the function and the argument."""


class MissingDependency(AgentRLError, ImportError):
    """An optional package is needed. Names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}'. Install it with: pip install -e '.[{extra}]'")


class ToolArgumentError(AgentRLError):
    """The model's arguments do not fit the tool. The message is written for the model to read."""


class EnvironmentFailed(AgentRLError):
    """The environment broke; not the model's mistake, so the rollout has no reward.

    Environments may raise it themselves (a dead sandbox, a lost connection). `stage` is "reset", "tool" or "reward".
    """

    def __init__(self, message: str, *, stage: str = "tool", deadline: bool = False) -> None:
        super().__init__(message)
        self.stage = stage
        self.deadline = deadline


class SamplerError(AgentRLError):
    """The sampler could not produce a turn."""


class RunStopped(AgentRLError):
    """The run cannot go on: too many failures in a row, or nothing left to train on."""


class SandboxUnavailable(ConfigurationError):
    """Nothing on this machine can run untrusted code safely. Says what is missing and what to install."""


class SandboxError(EnvironmentFailed):
    """A sandbox broke by itself; what the code in it does (a timeout, a crash) is a result and no error."""


class SandboxFileError(SandboxError):
    """A file that cannot be moved into or out of a sandbox: absent, no regular file, too large, outside of it."""
