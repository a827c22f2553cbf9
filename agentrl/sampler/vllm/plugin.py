"""What vLLM finds of agentrl when both are installed: a way for weights to arrive.

The entry point `vllm.general_plugins` calls `register` in every process of every vLLM on the machine, also of people
who train nothing: a name is added and nothing else happens, until someone asks for that name.
"""

from __future__ import annotations

ENGINE = "agentrl"
"""What `--weight-transfer-config '{"backend": ...}'` names to receive weights from agentrl."""


def register() -> None:
    """vLLM knows the weight-transfer engine `agentrl`; its code is imported when a server asks for it.

    May be called any number of times. A vLLM from before weight-transfer engines is left as it is.
    """
    try:
        from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
            WeightTransferEngineFactory,
        )
    except ImportError:
        return
    try:
        WeightTransferEngineFactory.register_engine(ENGINE, "agentrl.sampler.vllm.engine", "AgentRLWeights")
    except ValueError:  # known already: vLLM loads plugins once per process, tests and notebooks more often
        return
