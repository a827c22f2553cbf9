"""System calls that an older Docker engine lets through and no sandbox needs.

Engines from 25.0 on (API 1.44) have a default filter that stops all of these; before, io_uring and others were allowed.
An engine takes one filter only, so this one stands in the place of the old default and stops what that stopped too.
"""

from __future__ import annotations

import json

from agentrl.sandbox.bubblewrap.seccomp import DENIED, EAFNOSUPPORT, ENOSYS, EPERM, FAMILIES

FIRST_GOOD_API = (1, 44)
_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)  # CLONE_NEW...
# What the other backend does not need to name: calls of other architectures, or of engines' own default filters.
_MORE = [
    "clock_adjtime64", "clock_settime64", "create_module", "get_kernel_syms", "get_mempolicy",
    "open_tree_attr", "personality", "query_module", "set_mempolicy_home_node",
    "stime", "umount", "vm86", "vm86old", "vmsplice",
]  # fmt: skip


def profile() -> str:
    """The filter as the engine's JSON: what is not named is allowed, as the capabilities allow it (none are left)."""

    def error(number: int) -> dict[str, object]:
        return {"action": "SCMP_ACT_ERRNO", "errnoRet": number}

    def rule(call: str, value: int, operator: str, number: int) -> dict[str, object]:
        compare = {"index": 0, "value": value, "valueTwo": value, "op": f"SCMP_CMP_{operator}"}
        return {"names": [call], "args": [compare], **error(number)}

    rules: list[dict[str, object]] = [{"names": sorted({*DENIED, *_MORE}), **error(EPERM)}]
    # clone3 has its flags in memory, where no filter sees them: without it the C library takes clone.
    rules.append({"names": ["clone3"], **error(ENOSYS)})
    rules += [rule("clone", flag, "MASKED_EQ", EPERM) for flag in _NAMESPACES]
    rules += [rule("socket", family, "EQ", EAFNOSUPPORT) for family in range(max(FAMILIES)) if family not in FAMILIES]
    rules.append(rule("socket", max(FAMILIES), "GT", EAFNOSUPPORT))
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
