"""YAML as people mean it: 1e-6 is a number, no and off are words, and a key may stand only once."""

from __future__ import annotations

import re
from typing import Any

import yaml

from agentrl.errors import ConfigurationError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers and booleans of YAML 1.2."""


_BOOLS = [("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"))]
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_kept = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _first in "tTfF":
    _kept[_first] = _BOOLS + _kept.get(_first, [])
_Loader.yaml_implicit_resolvers = _kept
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """The table that the text holds.

    >>> read_yaml("train: {learning_rate: 1e-6, save_strategy: no}", "run.yaml")
    {'train': {'learning_rate': 1e-06, 'save_strategy': 'no'}}

    Raises:
        ConfigurationError: Not YAML (with the line), not a table, or a key that stands twice.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigurationError(f"'{name}' is not YAML: {error.problem}{where}.") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"'{name}' is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"'{name}' must be a table of sections; it is {type(value).__name__}.")
    return value
