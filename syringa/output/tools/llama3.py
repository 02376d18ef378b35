"""Llama 3.1 and later: an answer that is nothing but `{"name": …, "parameters": {…}}`, or several of these."""

from __future__ import annotations

from syringa.output.tools.objects import ObjectCalls, ObjectFormat


class Llama3Calls(ObjectCalls):
    """No mark sets a call apart from an answer that is JSON: it is one only if it begins as calls do and names a
    function that there is."""

    format = ObjectFormat(
        separator=";,",
        tag="<|python_tag|>",
        keys=frozenset({"type", "name", "parameters", "arguments"}),
    )

    def _is_call(self, name: str) -> bool:
        return not self._functions or name in self._functions
