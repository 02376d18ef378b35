"""A grammar probe without a model: `python -m tests.engine.structured_output.stub_probe SOCKET CPU_SECONDS BYTES LOG`.

The text of a grammar says what compiling it does. Each compilation appends a line to LOG.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from llguidance import LLTokenizer

from syringa.engine.structured_output.probe import GrammarProbe, compiler, serve
from syringa.errors import InvalidRequest
from syringa.types import Grammar


def compile_stub(grammar: Grammar) -> object:
    with Path(sys.argv[4]).open("a") as log:
        log.write(grammar.value + "\n")
    command, _, argument = grammar.value.partition(" ")
    match command:
        case "allocate":
            return bytes([1]) * int(argument)  # touches every page
        case "spin":
            while True:
                pass
        case "crash":
            os.abort()
        case "wait":
            while not Path(argument).exists():
                time.sleep(0.01)
        case "invalid":
            raise InvalidRequest(argument)
    return None


if __name__ == "__main__":
    real = compiler(LLTokenizer("byte"), {})
    probe = GrammarProbe(
        lambda grammar: real(grammar) if grammar.kind == "json_schema" else compile_stub(grammar),
        cpu_seconds=float(sys.argv[2]),
        memory_bytes=int(sys.argv[3]),
    )
    asyncio.run(serve(probe, sys.argv[1]))
